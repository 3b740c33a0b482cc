"""Takes a fleet through one case: the stage, the event, the ends, and the recovery."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

from tests.faults import invariants
from tests.faults.client import Client
from tests.faults.fleet import FaultFleet, Worker
from tests.faults.scenarios import Case, Event, Moment, Outcome
from tests.faults.stage import Stage
from tests.faults.strike import strike
from tests.support.patience import happens

ANSWERED_S = 15.0
"""How long an answer may take once nothing is held back any more."""

_COUNTED = {
    Outcome.LEFT: {"cancelled"},
    Outcome.DEADLINE: {"cancelled", "deadline_exceeded"},
}
"""The reasons under which the coordinator may count an end; a client with a deadline of its own
hangs up when that passes."""


class Trial:
    """One case on a fleet that is idle; `run` leaves it so, and says what it has found."""

    def __init__(self, fleet: FaultFleet, case: Case) -> None:
        self._fleet = fleet
        self._case = case
        self._found: list[str] = []
        self._stage: Stage

    async def run(self) -> list[str]:
        """Raises NotReached."""
        counted = self._counted()
        async with AsyncExitStack() as stack:
            coordinator, where = None, self._fleet.doors
            if self._case.event is Event.COORDINATOR_KILLED:
                coordinator, where = await stack.enter_async_context(
                    self._fleet.another_coordinator()
                )
                stack.callback(coordinator.kill)
            stage = self._stage = Stage(self._fleet, self._case, where, coordinator)
            try:
                await stage.set()
                await stage.reach()
                await strike(self._fleet, self._case, stage)
                await self._ends()
            finally:
                for client in stage.asked:
                    await client.leave()
                await self._recover()
        self._found += invariants.wrong_counts(counted, self._counted(), self._ends_as_counted())
        return self._found

    async def _ends(self) -> None:
        expected, reached = self._case.expected, self._reached()
        within_s = invariants.TOLD_S
        if self._case.event.is_silent:
            to_reader = self._waits_for_work()
            within_s += invariants.READER_SILENCE_S if to_reader else invariants.SILENCE_S
        if not expected.is_answer:
            if expected is not Outcome.LEFT and not await self._is_told(
                self._stage.victim, within_s
            ):
                self._found.append(f"the client was not told within {within_s:g} s")
            self._found += await invariants.not_as_before(reached, self._stage.before, within_s)
        if self._waits_for_work():
            await self._let_go("open")
            await self._attempt_is_over(within_s)
        else:
            await self._attempt_is_over(within_s)
            await self._let_go("open")
        await self._answers()
        await self._let_go("reset")
        self._found += await invariants.not_idle(self._fleet, reached, invariants.TOLD_S)

    async def _attempt_is_over(self, within_s: float) -> None:
        """Both sides of an attempt that failed are told, while another is under way."""
        if self._case.expected not in (Outcome.DETOUR, Outcome.CONTINUED):
            return
        stage, reached = self._stage, self._reached()
        self._found += await invariants.not_tried_again(
            reached, stage.victim, stage.at_event, within_s
        )
        for worker in stage.hit.values():
            if worker in reached:
                then = stage.at_event[worker.worker_id]
                self._found += await invariants.not_told(worker, stage.request_id, then, within_s)

    def _waits_for_work(self) -> bool:
        """Whether nobody can know of the event before the engines go on."""
        event, moment, stage = self._case.event, self._case.moment, self._stage
        if event is Event.LINK_CUT:
            return True
        if moment in (Moment.PREFILLED, Moment.TRANSFER):
            return event.side == "p"
        decode = stage.at_event[stage.hit["d"].worker_id]
        return event is Event.DECODE_FAILS and stage.request_id not in decode["requests"]

    async def _answers(self) -> None:
        stage = self._stage
        if self._case.expected is not Outcome.LEFT:
            await self._check(stage.victim, self._case.expected)
        for client in stage.others:
            await self._check(client, self._end_of(client))
        for client in stage.fillers:
            await self._check(client, Outcome.BROKEN)

    async def _check(self, client: Client, expected: Outcome) -> None:
        if not await self._is_told(client, ANSWERED_S):
            self._found.append(f"{client.question.request_id}: was told nothing")
            return
        said = await client.told()
        self._found += invariants.wrong_answer(client.question, expected, said)

    async def _is_told(self, client: Client, within_s: float) -> bool:
        async def is_told() -> bool:
            return client.done

        return await happens(is_told, within_s)

    def _end_of(self, other: Client) -> Outcome:
        """Others are reached only where all that their worker served is lost."""
        event, stage = self._case.event, self._stage
        if event.hits_whole_worker and event.side == "d":
            served = stage.before[stage.hit["d"].worker_id]["requests"]
            if other.question.request_id in served:
                return Outcome.CONTINUED
        return Outcome.UNNOTICED

    def _reached(self) -> list[Worker]:
        """The workers that can be told anything after the event."""
        event, hit = self._case.event, self._stage.hit
        lost = hit[event.side] if event.hits_whole_worker else None
        return [worker for worker in self._fleet.workers.values() if worker is not lost]

    async def _let_go(self, how: str) -> None:
        for worker in self._reached():
            await worker.do(how)

    async def _recover(self) -> None:
        """All is mended, proven anew, and idle."""
        fleet = self._fleet
        for proxy in (*fleet.links.values(), *(w.proxy for w in fleet.workers.values())):
            proxy.heal()
        for worker in fleet.workers.values():
            await worker.be_well()
            await worker.do("reset")
        await fleet.core.until_all_proven()
        self._found += await invariants.not_idle(fleet, fleet.workers.values(), invariants.TOLD_S)

    def _counted(self) -> Counter[str]:
        """Requests that have ended, by reason."""
        counted: Counter[str] = Counter()
        for family in self._fleet.core.registry.collect():
            for sample in family.samples:
                if sample.name == "pdserve_requests_total":
                    counted[sample.labels["reason"]] += int(sample.value)
        return counted

    def _ends_as_counted(self) -> list[set[str]]:
        ends = [self._end_of(client) for client in self._stage.others]
        if self._stage.coordinator is None:
            ends.append(self._case.expected)
        return [{"none"} if end.is_answer else _COUNTED[end] for end in ends]
