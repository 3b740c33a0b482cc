"""Makes an event happen."""

from __future__ import annotations

from pdserve.errors import ErrorReason
from tests.faults.fleet import FaultFleet, Worker
from tests.faults.scenarios import Case, Event, Moment
from tests.faults.stage import Stage
from tests.support.patience import happens

_READ = (Moment.PREFILLED, Moment.TRANSFER, Moment.FETCHED, Moment.STREAMING)


async def strike(fleet: FaultFleet, case: Case, stage: Stage) -> None:
    match case.event:
        case Event.CLIENT_LEAVES:
            await stage.victim.leave()
        case Event.DEADLINE:

            async def is_over() -> bool:
                return stage.victim.done

            assert stage.deadline_s is not None
            await happens(is_over, stage.deadline_s)
        case Event.COORDINATOR_KILLED:
            assert stage.coordinator is not None
            stage.coordinator.kill()
        case Event.LINK_CUT:
            fleet.links[stage.hit["p"].worker_id, stage.hit["d"].worker_id].cut()
        case _:
            await _strike_worker(fleet, case, stage.hit[case.event.side], stage.request_id)


async def _strike_worker(fleet: FaultFleet, case: Case, worker: Worker, request_id: str) -> None:
    match case.event:
        case Event.PREFILL_KILLED | Event.DECODE_KILLED:
            worker.kill()
        case Event.PREFILL_STOPPED | Event.DECODE_STOPPED:
            worker.stop()
        case Event.PREFILL_CUT_OFF | Event.DECODE_CUT_OFF:
            worker.proxy.cut()
            for ends, link in fleet.links.items():
                if worker.worker_id in ends:
                    link.cut()
        case Event.PREFILL_REFUSES | Event.DECODE_REFUSES:
            await worker.do("refuse")
            if case.event is Event.PREFILL_REFUSES and case.moment is Moment.PREFILL_QUEUED:
                await worker.do("fail", request=request_id, reason=ErrorReason.NO_ROOM.name)
        case Event.PREFILL_FAILS if case.moment in _READ:
            await worker.do("lose_blocks", request=request_id)
        case _:
            unknown = case.variation.unknown_fault
            await worker.do("fail", request=request_id, unknown=unknown)
