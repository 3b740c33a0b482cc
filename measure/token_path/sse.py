"""Counts the tokens of a streamed HTTP/1.1 answer, as cheaply as Python can.

The sources of this benchmark write each token as one space and one word, and no other space in
the events but that of "data: ": counting is then enough, and nothing is decoded.
"""

from __future__ import annotations

_END_OF_HEAD = b"\r\n\r\n"
_LINE_END = b"\r\n"
_DONE = b"data: [DONE]\n\n"


class AnswerError(Exception):
    """An answer that is not what was asked for; the message says what came instead."""


class SseMeter:
    """Reads one chunked answer, cut into pieces anywhere."""

    __slots__ = ("_done", "_in_body", "_unfinished_chunk", "_unfinished_event", "complete")

    def __init__(self) -> None:
        self.complete = False
        """Whether the HTTP response has ended."""
        self._in_body = False
        self._unfinished_chunk = b""
        self._unfinished_event = b""
        self._done = False

    def feed(self, data: bytes) -> int:
        """The number of tokens whose events these bytes complete.

        Raises AnswerError for another status than 200, and for an end without [DONE].
        """
        data = self._unfinished_chunk + data
        if not self._in_body:
            head, separator, body = data.partition(_END_OF_HEAD)
            if not separator:
                self._unfinished_chunk = data
                return 0
            if not head.startswith(b"HTTP/1.1 200 "):
                raise AnswerError(data.decode(errors="replace"))
            self._in_body = True
            data = body
        events = self._unfinished_event + self._chunks(data)
        end = events.rfind(b"\n\n") + 2
        if end == 1:  # no event ends here
            self._unfinished_event = events
            end = 0
        else:
            self._unfinished_event = events[end:]
            self._done = self._done or events.endswith(_DONE)
        if self.complete and not self._done:
            last = events.strip().rpartition(b"\n\n")[2].decode(errors="replace")
            raise AnswerError(f"the stream ended without [DONE], after {last}")
        return events.count(b" ", 0, end) - events.count(b"data: ", 0, end)

    def _chunks(self, data: bytes) -> bytes:
        """What the chunks that end here carry; a router may cut events in two by them."""
        # Size, content, size, content, and what is not complete: events have no "\r".
        parts = data.split(_LINE_END)
        if len(parts) % 2:
            self._unfinished_chunk = parts.pop()
        else:
            content = parts.pop()
            self._unfinished_chunk = parts.pop() + _LINE_END + content
        if len(parts) == 2:
            self.complete = parts[0] == b"0"
            return parts[1]
        if not parts:
            return b""
        self.complete = parts[-2] == b"0"
        return b"".join(parts[1::2])
