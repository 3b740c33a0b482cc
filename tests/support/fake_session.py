"""A fake worker's side of one session, and of the sequences in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from coordinator.sequence import Sequence
from pdserve.errors import DecodeError, PdserveError
from pdserve.types import EngineRequest, KvHandle
from tests.support.fake_script import Script, answer, lost, next_of, play

if TYPE_CHECKING:
    from tests.support.fake_worker import FakeWorker


class FakeSession:
    """A `Session`; `broken` ends it as a lost connection does."""

    def __init__(self, worker: FakeWorker) -> None:
        self.broken = asyncio.Event()
        self._worker = worker
        self._open: list[Sequence] = []
        self._last_id = 0
        self._over = False

    async def run(self) -> None:
        try:
            await self.broken.wait()
        finally:
            self._over = True
            for sequence in list(self._open):
                self.abort(sequence)
                sequence.fail(lost())
            self._worker._left(self)
        raise lost()

    @property
    def lost(self) -> bool:
        return self._over

    def open(self) -> Sequence:
        self._last_id += 1
        sequence = Sequence(self._last_id)
        if self._over:
            sequence.fail(lost())
        else:
            self._open.append(sequence)
        return sequence

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        self._worker.reserved.append(num_tokens)
        if sequence in self._open:
            self._begin(sequence, self._grant(sequence, next_of(self._worker.reservations)))

    def start(self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None) -> None:
        verb = "colocated" if kv is None else "decode"
        self._worker.served.append((verb, request.request_id))
        self._worker.requests.append(request)
        if sequence in self._open:
            script = next_of(self._worker.starts)
            self._begin(sequence, self._answer(sequence, request, kv, script))

    def abort(self, sequence: Sequence) -> None:
        if sequence in self._open:
            self._open.remove(sequence)
            if (task := self._worker.sequences.pop(sequence, None)) is not None:
                task.cancel()

    def give_up(self, cause: DecodeError) -> None:
        for sequence in list(self._open):
            self.abort(sequence)
            sequence.fail(cause)

    def _begin(self, sequence: Sequence, work: Any) -> None:
        self._worker.sequences[sequence] = asyncio.create_task(work)

    async def _grant(self, sequence: Sequence, script: Script) -> None:
        try:
            await play(script)
        except PdserveError as error:
            self._fail(sequence, error)
        else:
            sequence.grant()

    async def _answer(
        self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None, script: Script
    ) -> None:
        try:
            await play(script, sequence)
        except PdserveError as error:
            self._fail(sequence, error)
            return
        for delta in answer(request, handed_over=kv is not None):
            sequence.push(delta)
            await asyncio.sleep(0)
        self._end(sequence)

    def _fail(self, sequence: Sequence, error: PdserveError) -> None:
        self._end(sequence)
        sequence.fail(error)

    def _end(self, sequence: Sequence) -> None:
        self._open.remove(sequence)
        del self._worker.sequences[sequence]
