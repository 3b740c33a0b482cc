"""The HTTP calls of the command to a running coordinator, and what is said when they fail."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from cli.failure import CliError

_TIMEOUT = httpx.Timeout(10.0, read=None)
"""A first token may take long, and is waited for; a connection may not."""


@contextlib.contextmanager
def connect(url: str, key: str | None) -> Iterator[httpx.Client]:
    """A client for the coordinator at `url`; what httpx raises inside becomes a CliError.

    The address that OpenAI's SDKs take, with `/v1` at its end, will do.
    """
    if key and not (key.isascii() and key.isprintable()):
        raise CliError("--key: an API key is printable ASCII")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # trust_env: a proxy of the environment must not get between two local processes.
        with httpx.Client(
            base_url=url.removesuffix("/").removesuffix("/v1"),
            headers=headers,
            timeout=_TIMEOUT,
            trust_env=False,
        ) as client:
            yield client
    except httpx.InvalidURL as error:
        raise CliError(f"{url}: {error}") from None
    except httpx.RemoteProtocolError:
        raise CliError(f"{url} broke off in the middle of an answer") from None
    except httpx.ReadTimeout:
        raise CliError(f"{url} took too long to answer") from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CliError(f"no coordinator answers at {url}: {reason}") from None


def part(name: str) -> str:
    """A name as one part of a path, whatever is in it: `..` too, which else is resolved."""
    return quote(name, safe="").replace(".", "%2E")


def get_json(client: httpx.Client, path: str, timeout_s: float = 10.0) -> Any:
    """Raises CliError when the answer is a refusal, or is no JSON."""
    response = client.get(path, timeout=timeout_s)
    check(response)
    try:
        return response.json()
    except ValueError:
        raise CliError(f"{response.url} answers, but not as a coordinator does") from None


def check(response: httpx.Response) -> None:
    """Raises CliError with the server's own words when it refused."""
    if response.is_success:
        return
    response.read()
    try:
        message = error_text(response.json())
    except ValueError:
        message = response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += "; this command takes it from PDSERVE_KEY, or as --key"
    raise CliError(f"{message} (HTTP {response.status_code})")


def error_text(body: Any) -> str:
    """The message in an error body of the OpenAI shape."""
    with contextlib.suppress(KeyError, TypeError):
        return str(body["error"]["message"])
    return json.dumps(body)


def sse_data(response: httpx.Response) -> Iterator[Any]:
    """The JSON of each server-sent event up to [DONE]. Raises CliError for an error event."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise CliError(error_text(event))
        yield event
    raise CliError("the answer broke off before its end")
