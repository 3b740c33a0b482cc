"""The HTTP side of a request: its body, bounded, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import httptools
import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.errors import ErrorReason, PdserveError, RejectedError


async def read_json_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The body, of which no more than about `max_bytes` are ever held.

    Raises RejectedError for one that is no JSON by its header or too large, and PdserveError
    CANCELLED when the client leaves before its end.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RejectedError(
            ErrorReason.INVALID_ARGUMENT, "the body must be JSON, content-type: application/json"
        )
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _client_left()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return b"".join(parts)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, but one that ignores the offer of another protocol, as RFC 9110 has it.

    The parser takes the body of such a request for bytes of that protocol; and Java's own
    client offers HTTP/2 with every request.
    """

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._should_upgrade():
                self._start_anew(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("invalid HTTP request")
            self.send_400_response("Invalid HTTP request received.")

    def _should_upgrade(self) -> bool:
        """Has uvicorn leave the request alone until it comes without the offer."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def _start_anew(self, rest: bytes) -> None:
        """The head once more, without the offer, then what came after it."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = (pair for pair in self.headers if pair[0] != b"upgrade")
        head = b"%b %b HTTP/%b\r\n" % (method, self.url, version)
        lines = (b"%b: %b\r\n" % pair for pair in kept)
        self.data_received(b"".join((head, *lines, b"\r\n", rest)))


class WhileConnected:
    """Ends the body of its `async with` when the client leaves, by PdserveError CANCELLED.

    Whoever else cancels it is a server that stops: PdserveError DRAINING. To be entered once the
    request's body is read, and left before the response is complete.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.client_left = False

    async def __aenter__(self) -> WhileConnected:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        if self.client_left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise _client_left() from None
        if kind is asyncio.CancelledError and not self.client_left:
            raise stopping() from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        self._task.cancel()


def text_writer(send: Send, before: bytes, after: bytes) -> Callable[[str], bool] | None:
    """A short way for a body that has begun: writes a text as JSON, between `before` and `after`,
    as one chunk, in a plain call and without an ASGI message.

    It returns False, and has written nothing, where `send` must be used: when it would wait, or
    the client left. None where there is no such way, since `send` is not uvicorn's own or the
    body is not chunked.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    flow, write, dumps = cycle.flow, cycle.transport.write, orjson.dumps
    around = len(before) + len(after)
    after += b"\r\n"

    def write_text(text: str) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        data = dumps(text)
        write(b"%x\r\n%b%b%b" % (around + len(data), before, data, after))
        return True

    return write_text


def stopping() -> PdserveError:
    return PdserveError(ErrorReason.DRAINING, "the server stopped before the end of the answer")


def _too_large(max_bytes: int) -> RejectedError:
    return RejectedError(
        ErrorReason.BODY_TOO_LARGE, f"the body is larger than the limit of {max_bytes} bytes"
    )


def _client_left() -> PdserveError:
    return PdserveError(ErrorReason.CANCELLED, "the client left")
