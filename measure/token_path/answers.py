"""Reads answers, token by token: over HTTP as any client, over gRPC as the coordinator."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Protocol, Self, cast

import grpc
import orjson

from measure.token_path.sse import AnswerError, SseMeter
from pdserve.v1 import decode_pb2, generation_pb2
from pdserve.v1.decode_pb2_grpc import DecodeServiceStub

_PROMPT = "Tell me a story of a river."


class Window:
    """What came in, on all streams, while it was open. Times in seconds."""

    def __init__(self) -> None:
        self.is_open = False
        self.tokens = 0
        self.reads = 0
        self.gaps = array("d")

    def add(self, tokens: int, gap: float) -> None:
        self.tokens += tokens
        self.reads += 1
        self.gaps.append(gap)
        for _ in range(tokens - 1):  # they came together
            self.gaps.append(0.0)


class Tally:
    """The tokens of one answer; times of `time.monotonic`, 0 before the first token."""

    __slots__ = ("_window", "first", "last", "tokens")

    def __init__(self, window: Window | None = None) -> None:
        self._window = window
        self.tokens = 0
        self.first = 0.0
        self.last = 0.0

    def add(self, tokens: int) -> None:
        now = time.monotonic()
        if not self.tokens:
            self.first = now
        elif self._window is not None and self._window.is_open:
            self._window.add(tokens, now - self.last)
        self.tokens += tokens
        self.last = now


class Reader(Protocol):
    """One connection, for one answer at a time."""

    async def answer(self, model: str, max_tokens: int, tally: Tally) -> None:
        """Returns at the end; raises AnswerError if it has not `max_tokens` tokens."""

    async def close(self) -> None: ...


class HttpReader(asyncio.Protocol):
    """A streamed chat over one kept connection."""

    def __init__(self) -> None:
        self._meter = SseMeter()
        self._tally = Tally()
        self._ended: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, address: str) -> Self:
        host, port = address.rsplit(":", 1)
        _, reader = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return reader

    async def answer(self, model: str, max_tokens: int, tally: Tally) -> None:
        self._meter, self._tally = SseMeter(), tally
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(_request(model, max_tokens))
        await self._ended
        _check(tally, max_tokens)

    async def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            if tokens := self._meter.feed(data):
                self._tally.add(tokens)
        except AnswerError as error:
            self._end(error)
        else:
            if self._meter.complete:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(AnswerError(f"the connection was lost: {exc or 'closed by the router'}"))

    def _end(self, error: AnswerError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class GrpcReader:
    """A decode worker's session, with one sequence at a time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._call = DecodeServiceStub(self._channel).Session()
        self._sequence_id = 0

    async def answer(self, model: str, max_tokens: int, tally: Tally) -> None:
        self._sequence_id += 1
        await self._call.write(_start(self._sequence_id, max_tokens))
        while True:
            message = await self._call.read()
            if not isinstance(message, decode_pb2.SessionResponse):
                raise AnswerError("the worker ended its session")
            tally.add(len(message.tokens.token_ids))
            for delta in message.deltas:
                if delta.HasField("failure"):
                    raise AnswerError(delta.failure.message)
                tally.add(len(delta.token_ids))
                if delta.finish_reason:
                    _check(tally, max_tokens)
                    return

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def _request(model: str, max_tokens: int) -> bytes:
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": _PROMPT}],
            "stream": True,
            "max_tokens": max_tokens,
            # So that the simulated model does not end the answer before.
            "min_tokens": max_tokens,
        }
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _start(sequence_id: int, max_tokens: int) -> decode_pb2.SessionRequest:
    return decode_pb2.SessionRequest(
        start=decode_pb2.StartSequence(
            sequence_id=sequence_id,
            request_id=f"direct-{sequence_id}",
            prompt=generation_pb2.TokenIds(ids=[byte + 3 for byte in _PROMPT.encode()]),
            sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens),
        )
    )


def _check(tally: Tally, max_tokens: int) -> None:
    if tally.tokens != max_tokens:
        raise AnswerError(f"{tally.tokens} tokens came, not {max_tokens}")
