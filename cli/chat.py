"""`pdserve chat`"""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from cli.failure import CliError
from cli.options import DEFAULT_URL, Key, Url
from pdserve.types import Mode

if TYPE_CHECKING:
    import httpx


def chat(
    url: Url = DEFAULT_URL,
    key: Key = None,
    model: Annotated[str | None, typer.Option(help="By default, the first one served.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="Asks for a route.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 512,
) -> None:
    """Talks with a model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from cli.http import connect, get_json

    with connect(url, key) as client:
        if model is None:
            served = get_json(client, "/v1/models")["data"]
            if not served:
                raise CliError(f"{url} serves no model")
            model = served[0]["id"]
        talk = Conversation(client, model, mode, max_tokens)
        if system:
            talk.add("system", system)
        if sys.stdin.isatty():
            _converse(talk)
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.turn(line.strip())


def _converse(talk: Conversation) -> None:
    import readline  # noqa: F401  (gives input() its history and line editing)

    print(f"{talk.model}; Ctrl-C stops an answer, Ctrl-D ends the conversation")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the conversation)")
            continue
        if not line:
            continue
        try:
            talk.turn(line)
        except CliError as error:
            print(f"pdserve: error: {error}", file=sys.stderr)


@dataclass
class Conversation:
    """The messages so far, and the way to the next one."""

    client: httpx.Client
    model: str
    mode: Mode | None
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)
    _session: str = field(default_factory=lambda: uuid.uuid4().hex)

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def turn(self, text: str) -> None:
        """Asks, and prints the answer as it comes. A question that failed is forgotten."""
        self.add("user", text)
        answer = _Answer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            answer.footer.append("stopped")
        except CliError:
            self.messages.pop()
            if answer.text:
                print()
            raise
        self.add("assistant", answer.text)
        print()
        _dim(", ".join(answer.footer))

    def _stream(self, answer: _Answer) -> None:
        from cli.http import check, sse_data

        headers = {"x-pdserve-session": self._session}
        if self.mode:
            headers["x-pdserve-mode"] = self.mode.value
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        with self.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            check(response)
            # The reason names the route, too: "colocated: ...".
            answer.footer.append(response.headers.get("x-pdserve-reason", "route not told"))
            first: float | None = None
            tokens = 0
            for event in sse_data(response):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and first is None:
                        first = time.monotonic()
                    answer.text += piece
                    print(piece, end="", flush=True)
        answer.footer += _speed(began, first, tokens)


@dataclass
class _Answer:
    text: str = ""
    footer: list[str] = field(default_factory=list)


def _speed(began: float, first: float | None, tokens: int) -> list[str]:
    if first is None:
        return ["empty answer"]
    parts = [f"first token after {(first - began) * 1000:.0f} ms"]
    rest = time.monotonic() - first
    if tokens > 1 and rest > 0:
        parts.append(f"{(tokens - 1) / rest:.1f} tokens/s")
    return parts


def _dim(text: str) -> None:
    """On standard error when the answers go to a program."""
    if sys.stdout.isatty():
        print(f"\033[2m{text}\033[0m")
    else:
        print(text, file=sys.stderr, flush=True)
