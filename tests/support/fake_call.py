"""A fake worker's side of one prefill."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import ErrorReason, PrefillError
from pdserve.types import KvHandle, PrefillResult
from tests.support.fake_script import CACHED_AT_PREFILL, PREFILL_S, Script, play

if TYPE_CHECKING:
    from tests.support.fake_worker import FakeWorker


class FakePrefillCall:
    """A `PrefillCall`. As on a real worker, the reading goes on until it is done or the call is
    ended; the lease lasts as long as the call."""

    def __init__(self, worker: FakeWorker, handle: KvHandle, script: Script) -> None:
        self._worker = worker
        self._handle = handle
        self._early = handle.descriptor.transport == "grpc"
        self._reading = asyncio.create_task(self._read(script))
        # A call may be ended before anybody has heard of its failure.
        self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def admitted(self) -> KvHandle | None:
        await asyncio.sleep(0)
        if not self._worker.up:
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker is away")
        return self._handle if self._early else None

    async def finished(self) -> PrefillResult:
        try:
            await asyncio.shield(self._reading)
        except asyncio.CancelledError:
            self.end()
            raise
        return PrefillResult(self._handle, CACHED_AT_PREFILL, queue_s=0.0, prefill_s=PREFILL_S)

    def end(self) -> None:
        self._reading.cancel()
        self._worker.leases.discard(self._handle.handle_id)

    async def _read(self, script: Script) -> None:
        worker = self._worker
        if self._early:
            worker.leases.add(self._handle.handle_id)
        worker.prefilling += 1
        try:
            await play(script)
        finally:
            worker.prefilling -= 1
        if not worker.up:
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker died")
        if worker.epoch == self._handle.epoch:
            worker.leases.add(self._handle.handle_id)
