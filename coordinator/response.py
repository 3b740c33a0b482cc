"""The answer of one request as a façade reads it, and the one release path of its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from coordinator.climb import Climb
from coordinator.lifecycle import TERMINAL
from coordinator.observer import Observer
from coordinator.record import RequestRecord, ended_by
from coordinator.sequence import Take
from pdserve.errors import DecodeError, ErrorReason, PdserveError
from pdserve.types import Delta, Route


class Place(Protocol):
    """What is given back at the end of an answer of so many tokens, None where it did not come
    to its end."""

    def release(self, answer_tokens: int | None = None) -> None: ...


class ResponseStream:
    """Iterates over deltas; the last has a finish reason. Owns the execution and the permit.

    Where the decode worker cuts the answer off, another one goes on with it.

    The reader must call `aclose`, whatever happened: before the last delta that is a
    cancellation, after it nothing is left to undo but the bookkeeping.
    """

    def __init__(
        self,
        climb: Climb,
        first: Delta,
        permit: Place,
        record: RequestRecord,
        observer: Observer,
        on_answer: Callable[[int], None],
    ) -> None:
        """`on_answer` is told the tokens of an answer that came to its end."""
        assert record.route is not None
        self.route: Route = record.route
        self.request_id = record.request_id
        self.prompt_token_ids = climb.prompt_token_ids
        self._climb = climb
        self._execution = climb.execution
        self._first: Delta | None = first
        self._permit = permit
        self._record = record
        self._observer = observer
        self._on_answer = on_answer
        self._latencies = observer.metrics.inter_token
        self._series = record.gaps or self._latencies.series(record.model, record.route.mode.value)
        self._take: Take | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._error: PdserveError | None = None
        record.answers()

    def expire_at(self, deadline: float) -> None:
        """Fails the stream with DEADLINE_EXCEEDED at that time of `time.monotonic`."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(deadline - time.monotonic(), self._expire)

    def forward(self, write: Callable[[str], bool]) -> None:
        """From now on text that comes alone may be written in the call in which it arrives,
        instead of waking the reader in `__anext__`.

        Both get what comes in order. `write` returns False to have the reader woken after all.
        """
        record, series, observe = self._record, self._series, self._latencies.observe

        def take(text: str, now: float) -> bool:
            if text and not write(text):
                return False
            observe(series, now - record.last_token)
            record.last_token = now
            return True

        self._take = take
        self._execution.forward(take)

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Delta:
        """Raises PdserveError when the answer cannot go on."""
        if self._ended:
            raise StopAsyncIteration
        delta = self._first
        if delta is not None:
            self._first = None
        else:
            try:
                try:
                    delta = await self._execution.next()
                except DecodeError as error:
                    delta = await self._resume(error)
            except PdserveError as error:
                self._ended = True
                self._error = error
                raise
            self._count_gap()
        if delta.finish_reason is not None:
            self._ended = True
            self._record.usage = delta.usage
            self._record.finish_reason = delta.finish_reason
            if delta.usage is not None:
                self._on_answer(delta.usage.completion_tokens)
        return delta

    async def _resume(self, cause: DecodeError) -> Delta:
        """The first delta after `cause` cut the answer off."""
        try:
            async with asyncio.timeout_at(None if self._timer is None else self._timer.when()):
                delta = await self._climb.resume(cause)
        except TimeoutError:
            raise _too_late() from None
        self._record.continued()
        self._execution = self._climb.execution
        if self._take is not None:
            self._execution.forward(self._take)
        return delta

    def _expire(self) -> None:
        self._execution.fail(_too_late())

    def _count_gap(self) -> None:
        now = time.monotonic()
        self._latencies.observe(self._series, now - self._record.last_token)
        self._record.last_token = now

    def _tell_used(self) -> None:
        record, execution = self._record, self._execution
        record.answered_tokens = execution.answered_tokens
        if record.writer is not None and execution.sharing is not None:
            mean = (record.writer.sharing + execution.sharing) / 2
            record.writer = replace(record.writer, sharing=mean)

    async def aclose(self) -> None:
        """Gives everything back and tells how it ended; idempotent, and never waits."""
        if self._record.state in TERMINAL:
            return
        if not self._ended:
            self._ended = True
            self._error = PdserveError(ErrorReason.CANCELLED, "the client left")
        self._record.apply(ended_by(self._error))
        if self._timer is not None:
            self._timer.cancel()
        self._tell_used()
        self._execution.release()
        usage = self._record.usage
        self._permit.release(None if usage is None else usage.completion_tokens)
        self._observer.done(self._record, self._error)


def _too_late() -> DecodeError:
    return DecodeError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed before the end")
