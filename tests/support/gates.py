"""A simulated engine that a test holds still at a moment, and whose sequences it can fail."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from pdserve.clock import RealClock
from pdserve.config import SimConfig
from pdserve.engine.base import Admitted, Prefilled
from pdserve.engine.sim import SimEngine
from pdserve.types import (
    Delta,
    EngineRequest,
    KvDescriptor,
    SamplingParams,
    SimDescriptor,
)

OCCUPANT = "occupant"


class Gate:
    """Open, it lets everybody pass; closed, only as many as `allow` says."""

    def __init__(self) -> None:
        self._open = True
        self._permits = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reached = asyncio.Event()

    @property
    def waiting(self) -> int:
        return sum(not place.done() for place in self._waiting)

    def close(self) -> None:
        self._open = False
        self._permits = 0

    def open(self) -> None:
        self._open = True
        self._admit()

    def allow(self, number: int) -> None:
        """Lets so many more pass, now or when they come."""
        self._permits += number
        self._admit()

    async def passed(self) -> None:
        if not self._open and not self._permits:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            self._reached.set()
            await place
        elif not self._open:
            self._permits -= 1

    async def until_waited_for(self) -> None:
        """Returns when somebody stands before it."""
        while not self.waiting:
            self._reached.clear()
            await self._reached.wait()

    def _admit(self) -> None:
        while self._waiting and (self._open or self._permits):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._permits -= not self._open


class GatedClock(RealClock):
    """The clock of one simulated engine: `steps` holds its steps, `transfers` what it fetches."""

    def __init__(self) -> None:
        self.steps = Gate()
        self.transfers = Gate()

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        match task.get_name():
            case "sim engine":
                await self.steps.passed()
            case "sim lease":
                pass
            case _:
                await self.transfers.passed()
        await super().sleep(seconds)


@dataclass(slots=True)
class Call:
    """One sequence in the engine, and the tokens that it has written."""

    serial: int
    tokens: int = 0
    _failure: Exception | None = None
    _scope: asyncio.Timeout | None = None

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def or_failure(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._failure is not None:
                    self.fail(self._failure)
                yield
        except TimeoutError:
            assert self._failure is not None
            raise self._failure from None
        finally:
            self._scope = None


@dataclass(slots=True)
class Calls:
    """`now` are those under way, by request."""

    now: dict[str, Call] = field(default_factory=dict)
    _begun: int = 0

    @contextmanager
    def one(self, request_id: str) -> Iterator[Call]:
        self._begun += 1
        call = self.now[request_id] = Call(self._begun)
        try:
            yield call
        finally:
            if self.now.get(request_id) is call:
                del self.now[request_id]


class GatedEngine(SimEngine):
    """`routes` says through which port another worker's KV port is reached."""

    def __init__(self, config: SimConfig, revision: str, routes: Mapping[int, int]) -> None:
        self.gates = GatedClock()
        super().__init__(config, revision, self.gates)
        self._routes = routes
        self._occupant: asyncio.Task[None] | None = None
        self.calls = Calls()
        self.kept: dict[str, SimDescriptor] = {}
        """Blocks that were read, by request; they may be free again."""
        self.doom: Exception | None = None
        """What the next sequence fails with."""
        self.refusal: Exception | None = None
        """What every sequence is refused with, while it is set."""

    async def prefill(
        self, request: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[Admitted | Prefilled]:
        if self.refusal is not None:
            raise self.refusal
        events = super().prefill(request, lease_s, transport)
        with self.calls.one(request.request_id) as call:
            self._strike(call)
            async with aclosing(events):
                while True:
                    try:
                        async with call.or_failure():
                            event = await anext(events)
                    except StopAsyncIteration:
                        return
                    if isinstance(event, Prefilled):
                        assert isinstance(event.descriptor, SimDescriptor)
                        self.kept[request.request_id] = event.descriptor
                    yield event

    async def generate(
        self, request: EngineRequest, kv: KvDescriptor | None
    ) -> AsyncIterator[Delta]:
        if isinstance(kv, SimDescriptor):
            kv = replace(kv, port=self._routes.get(kv.port, kv.port))
        deltas = super().generate(request, kv)
        assert isinstance(deltas, AsyncGenerator)
        with self.calls.one(request.request_id) as call:
            self._strike(call)
            async with aclosing(deltas):
                while True:
                    try:
                        async with call.or_failure():
                            delta = await anext(deltas)
                    except StopAsyncIteration:
                        return
                    call.tokens += len(delta.token_ids)
                    yield delta

    def _strike(self, call: Call) -> None:
        if self.doom is not None:
            call.fail(self.doom)
            self.doom = None

    async def lose_blocks(self, request_id: str) -> None:
        """Gives away blocks that are held for somebody, as no engine should."""
        await self.release(self.kept[request_id])

    def occupy(self) -> None:
        """Has the engine begin a step that the closed gate will not let end."""
        self.gates.steps.close()
        self._occupant = asyncio.create_task(self._read_something())

    async def vacate(self) -> None:
        if self._occupant is not None:
            self._occupant.cancel()
            await asyncio.gather(self._occupant, return_exceptions=True)
            self._occupant = None

    async def _read_something(self) -> None:
        request = EngineRequest(OCCUPANT, (1, 2, 3), SamplingParams(max_tokens=1))
        async with aclosing(SimEngine.prefill(self, request, 1.0, "nixl")) as events:
            async for event in events:
                if isinstance(event, Prefilled):
                    await self.release(event.descriptor)
