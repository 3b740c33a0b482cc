"""Brings a fleet to where a case begins: others at work, and one request held at its moment.

Every wait is for what the workers say that they hold; what holds them are the gates of their
engines.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from pdserve.types import Mode
from tests.faults.client import Client, Doors, Question
from tests.faults.fleet import PLACES, Child, FaultFleet, State, Worker
from tests.faults.scenarios import Case, Event, Moment
from tests.support.patience import happens
from tests.support.sim_fleet import MODEL

REACHED_S = 10.0
DEADLINE_S = 2.0
PACES = 8
"""A deadline leaves more time than it takes to reach any moment: some seconds, and as many times
as long as it took to bring the others to work, on this machine and now."""
WAITS = 3
"""Predicted waits, which grow meanwhile, that a deadline leaves time for where a request is to be
queued: one that would be late is refused at once."""
LONG, SHORT = 64, 24
"""Tokens of the others' answers, and of the one that is looked at."""
SEEN = 2
"""Tokens, or pieces of the answer, that are out in mid-stream."""
CHUNKS = 2
"""Of six, that are read in mid-prefill."""


class NotReached(Exception):
    """The fleet could not be brought there."""


class Stage:
    """`others` are in mid-stream on both decode workers of the fleet's own coordinator.

    `where` are the doors of the coordinator that the request is asked of, and `coordinator` is
    its process, where it is to be killed; `fillers` then take its places while the request
    is queued. After `set`, `before` has the states without the request; after `reach`,
    `at_event` those with it, and `hit` its two workers by side: before it has a plan, any two.
    """

    def __init__(
        self, fleet: FaultFleet, case: Case, where: Doors, coordinator: Child | None
    ) -> None:
        self._fleet = fleet
        self._case = case
        self._how = case.variation
        self._where = where
        self.coordinator = coordinator
        self.others: list[Client] = []
        self.fillers: list[Client] = []
        self.asked: list[Client] = []
        self.before: dict[str, State] = {}
        self.at_event: dict[str, State] = {}
        self.hit: dict[str, Worker] = {}
        self.deadline_s: float | None = None
        self._set_s = 0.0

    @property
    def victim(self) -> Client:
        return self.asked[-1]

    @property
    def request_id(self) -> str:
        return self.victim.question.request_id

    async def set(self) -> None:
        began = time.monotonic()
        for worker in self._fleet.decodes:
            await worker.do("gate", steps=0)
        others = [("http-stream", Mode.COLOCATED), ("grpc-stream", Mode.DISAGGREGATED)]
        if self._case.moment is Moment.QUEUED and self.coordinator is None:
            others.append(("grpc-stream", Mode.COLOCATED))
        for number, (surface, mode) in enumerate(others):
            self.others.append(self._ask(f"other{number}", surface, mode, self._fleet.doors))
        await self._stepping(self._others_stream)
        await self._until(self._all(self._fleet.decodes, _is_held))
        await self._until(self._all(self._fleet.prefills, _holds_nothing))
        if self._case.moment is Moment.PREFILL_QUEUED:
            for worker in self._fleet.prefills:
                await worker.do("occupy")
            await self._until(self._all(self._fleet.prefills, _is_held))
        self.before = await self._states()
        self._set_s = time.monotonic() - began

    async def reach(self) -> None:
        case = self._case
        if case.moment is Moment.QUEUED and self.coordinator is not None:
            for number in range(PLACES):
                filler = self._ask(f"filler{number}", "http-stream", Mode.COLOCATED, self._where)
                self.fillers.append(filler)
            await self._until(self._places_are_taken)
        if case.moment is Moment.PREFILLING:
            for worker in self._fleet.prefills:
                await worker.do("gate", steps=CHUNKS)
        if case.moment in (Moment.TRANSFER, Moment.FETCHED):
            for worker in self._fleet.decodes:
                await worker.do("gate", transfers=False)
        if case.event is Event.DEADLINE:
            predicted_s = self._fleet.core.gateway.admissions[MODEL].wait_s
            self.deadline_s = DEADLINE_S + PACES * self._set_s + WAITS * predicted_s
        surface, deadline_s = self._how.surface, self.deadline_s
        self._ask("victim", surface, Mode.DISAGGREGATED, self._where, SHORT, deadline_s)
        await {
            Moment.QUEUED: self._queued,
            Moment.PREFILL_QUEUED: self._prefill_queued,
            Moment.PREFILLING: self._prefilling,
            Moment.PREFILLED: self._prefilled,
            Moment.TRANSFER: self._transfer,
            Moment.FETCHED: self._fetched,
            Moment.STREAMING: self._streaming,
        }[case.moment]()
        self.at_event = await self._states()
        self.hit = {"p": self._placed(self._fleet.prefills), "d": self._placed(self._fleet.decodes)}

    def _ask(
        self,
        name: str,
        surface: str,
        mode: Mode,
        where: Doors,
        tokens: int = LONG,
        deadline_s: float | None = None,
    ) -> Client:
        # The prompt begins with the id: what sets the requests of a fleet apart comes first.
        case = self._case
        words = name, str(case.seed), case.transport, case.moment, case.event
        client = Client(where, Question(".".join(words), surface, mode, tokens, deadline_s))
        self.asked.append(client)
        return client

    # The moments.

    async def _queued(self) -> None:
        await self._until(self._is_queued)

    async def _prefill_queued(self) -> None:
        await self._until(self._any(self._fleet.prefills, self._waits))
        await self._ask_early()

    async def _prefilling(self) -> None:
        await self._until(self._any(self._fleet.prefills, self._is_held_in_step))
        await self._ask_early()

    async def _prefilled(self) -> None:
        await self._until(self._any(self._fleet.prefills, self._was_read))
        await self._until(self._any(self._fleet.decodes, self._waits))

    async def _transfer(self) -> None:
        await self._stepping(self._any(self._fleet.decodes, self._is_fetching))

    async def _fetched(self) -> None:
        await self._transfer()
        for worker in self._fleet.decodes:
            await worker.do("gate", transfers=True)
        await self._until(self._any(self._fleet.decodes, self._waits_no_more))

    async def _streaming(self) -> None:
        if self._how.surface.endswith("stream"):
            await self._stepping(self._victim_streams)
        else:
            await self._stepping(self._any(self._fleet.decodes, self._has_written))
            if self.coordinator is None:
                await self._until(self._has_been_read)

    async def _ask_early(self) -> None:
        """Over gRPC the decode worker has the sequence already; it may ask for the blocks."""
        if self._case.transport != "grpc":
            return
        await self._until(self._any(self._fleet.decodes, self._waits))
        if self._how.early_fetch:
            for worker in self._fleet.decodes:
                await worker.do("gate", steps=1)
            await self._until(self._all(self._fleet.decodes, _is_held))

    # What they are known by.

    def _waits(self, state: State) -> bool:
        return self.request_id in state["requests"] and state["waiting"] > 0

    def _waits_no_more(self, state: State) -> bool:
        return self.request_id in state["requests"] and state["waiting"] == 0

    def _is_held_in_step(self, state: State) -> bool:
        return self.request_id in state["requests"] and _is_held(state)

    def _is_fetching(self, state: State) -> bool:
        return self.request_id in state["requests"] and state["transfers_waiting"] > 0

    def _was_read(self, state: State) -> bool:
        return self.request_id in state["kept"]

    def _has_written(self, state: State) -> bool:
        call = state["requests"].get(self.request_id)
        return call is not None and call["tokens"] >= SEEN

    async def _has_been_read(self) -> bool:
        """The coordinator knows of the first token, which no client sees."""
        writing = sum(worker.writing for worker in self._fleet.core.fleet.workers())
        return writing == len(self.others) + 1

    async def _victim_streams(self) -> bool:
        return self.victim.pieces >= SEEN

    async def _others_stream(self) -> bool:
        return all(client.pieces for client in self.others)

    async def _places_are_taken(self) -> bool:
        assert self.coordinator is not None
        return bool((await self.coordinator.do("state"))["running"] == PLACES)

    async def _is_queued(self) -> bool:
        if self.coordinator is not None:
            return bool((await self.coordinator.do("state"))["queued"] == 1)
        return any(admission.queued for admission in self._fleet.core.gateway.admissions.values())

    def _placed(self, workers: list[Worker]) -> Worker:
        for worker in workers:
            now, then = self.at_event[worker.worker_id], self.before[worker.worker_id]
            here = self.request_id in now["requests"] or self.request_id in now["kept"]
            if here or now["reserved"] > then["reserved"]:
                return worker
        return workers[self._how.target]

    # Waiting.

    async def _states(self) -> dict[str, State]:
        return {name: await worker.do("state") for name, worker in self._fleet.workers.items()}

    def _any(
        self, workers: list[Worker], condition: Callable[[State], bool]
    ) -> Callable[[], Awaitable[bool]]:
        async def is_so() -> bool:
            return any([condition(await worker.do("state")) for worker in workers])

        return is_so

    def _all(
        self, workers: list[Worker], condition: Callable[[State], bool]
    ) -> Callable[[], Awaitable[bool]]:
        async def is_so() -> bool:
            return all([condition(await worker.do("state")) for worker in workers])

        return is_so

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        if not await happens(condition, REACHED_S):
            raise NotReached(f"{await self._states()}")

    async def _stepping(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Lets the decode engines go on step by step until it is so."""

        async def step() -> bool:
            if await condition():
                return True
            for worker in self._fleet.decodes:
                if _is_held(await worker.do("state")):
                    await worker.do("gate", steps=1)
            return False

        await self._until(step)


def _holds_nothing(state: State) -> bool:
    return not state["unfinished"]


def _is_held(state: State) -> bool:
    return bool(state["steps_waiting"])
