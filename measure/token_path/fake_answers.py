"""The streamed answers of the fake vLLM server, at two paces."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

import orjson

from pdserve.engine.sim_model import WORDS

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_TOKENS_PER_WRITE = 16


class Answer(Protocol):
    """What a connection tells the answer that is written to it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def drop(self) -> None:
        """The client left."""


@dataclass(frozen=True, slots=True)
class _Frames:
    """The bytes of one answer: its head, the chunk of each word, and its last token and end."""

    head: bytes
    words: Iterator[bytes]
    last: bytes


def _frames(model: str) -> _Frames:
    common = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + orjson.dumps({**common, "choices": [choice]}) + b"\n\n"

    def word(text: str, finish: str | None = None) -> bytes:
        return event({"content": f" {text}"}, finish)

    opening = event({"role": "assistant", "content": ""})
    return _Frames(
        head=_HEAD + _http_chunk(opening),
        words=cycle([_http_chunk(word(text)) for text in WORDS[:32]]),
        last=_http_chunk(word(WORDS[0], "length") + b"data: [DONE]\n\n") + _END,
    )


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class PacedAnswer:
    """Gets a token at each step; for a client too slow for that it is buffered."""

    def __init__(self, steps: Steps, transport: asyncio.WriteTransport, frames: _Frames) -> None:
        self._steps = steps
        self._write = transport.write
        self._frames = frames
        self._head = frames.head

    def step(self) -> None:
        self._write(self._head + next(self._frames.words))
        self._head = b""

    def end(self) -> None:
        self._write(self._head + self._frames.last)

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def drop(self) -> None:
        self._steps.remove(self)


class Steps:
    """The steps of an imagined engine, from one into the next, while it has answers to write."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[PacedAnswer, int] = {}
        self._arrived: dict[PacedAnswer, int] = {}
        self._running: asyncio.Task[None] | None = None

    def add(self, transport: asyncio.WriteTransport, model: str, max_tokens: int) -> Answer:
        """Its first token comes after a whole step that begins when the current one has ended."""
        answer = PacedAnswer(self, transport, _frames(model))
        self._arrived[answer] = max_tokens
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return answer

    def remove(self, answer: PacedAnswer) -> None:
        self._left.pop(answer, None)
        self._arrived.pop(answer, None)

    async def _run(self) -> None:
        due = time.monotonic()
        while self._left or self._arrived:
            self._left |= self._arrived
            self._arrived.clear()
            due += self._step_s
            await asyncio.sleep(due - time.monotonic())
            self._step()

    def _step(self) -> None:
        ended = [answer for answer, left in self._left.items() if left == 1]
        for answer in ended:
            del self._left[answer]
            answer.end()
        for answer in self._left:
            answer.step()
            self._left[answer] -= 1


class QuickAnswer:
    """Writes until it must pause, and goes on when it may."""

    def __init__(self, transport: asyncio.WriteTransport, model: str, max_tokens: int) -> None:
        self._transport = transport
        self._frames = _frames(model)
        self._left = max_tokens
        self._waiting = self._paused = False
        transport.write(self._frames.head)
        self._go_on()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if not self._waiting:
            self._go_on()

    def drop(self) -> None:
        self._left = 0

    def _go_on(self) -> None:
        self._waiting = False
        if self._paused or not self._left:
            return
        count = min(_TOKENS_PER_WRITE, self._left - 1)
        self._left -= count
        self._transport.write(b"".join(islice(self._frames.words, count)))
        if self._left == 1:
            self._left = 0
            self._transport.write(self._frames.last)
        else:
            # Not in a loop: the other answers have their turn too.
            self._waiting = True
            asyncio.get_running_loop().call_soon(self._go_on)
