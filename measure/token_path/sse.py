"""Counts the tokens of a streamed HTTP/1.1 answer, as cheaply as Python can.

The sources of this benchmark write each token as one space and one word, and no other space
after the head but that of "data: ": counting is then enough, and nothing is decoded.
"""

from __future__ import annotations

_END_OF_HEAD = b"\r\n\r\n"
_DONE = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


class AnswerError(Exception):
    """An answer that is not what was asked for; the message says what came instead."""


class SseMeter:
    """Reads one answer, cut into pieces anywhere."""

    __slots__ = ("_done", "_in_body", "_rest", "complete")

    def __init__(self) -> None:
        self.complete = False
        """Whether the HTTP response has ended."""
        self._in_body = False
        self._rest = b""
        self._done = False

    def feed(self, data: bytes) -> int:
        """The number of tokens whose events these bytes complete.

        Raises AnswerError for another status than 200, and for an end without [DONE].
        """
        data = self._rest + data
        if not self._in_body:
            head, separator, data = data.partition(_END_OF_HEAD)
            if not separator:
                self._rest = head
                return 0
            if not head.startswith(b"HTTP/1.1 200 "):
                raise AnswerError((head + separator + data).decode(errors="replace"))
            self._in_body = True
        end = data.rfind(b"\n\n") + 2
        if end == 1:  # no event ends here
            self._rest = data
            self._check_end()
            return 0
        events = data[:end]
        self._rest = data[end:]
        if events.endswith(_DONE):
            self._done = True
        self._check_end()
        return events.count(b" ") - events.count(b"data: ")

    def _check_end(self) -> None:
        if self._rest.endswith(_LAST_CHUNK):
            if not self._done:
                raise AnswerError("the stream ended without [DONE]")
            self.complete = True
