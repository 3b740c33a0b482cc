"""A dispatcher that answers by script, stepped by gates and never by time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.catalog import ServedModel, build
from coordinator.defaults import Defaults
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller, KeyRing
from coordinator.metrics import CoordinatorMetrics
from coordinator.prompts import ByteEncoder
from coordinator.record import RequestRecord
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig, GatewayConfig, ModelConfig
from pdserve.errors import PdserveError
from pdserve.parsing import ChatParser
from pdserve.types import Delta, FinishReason, GenerateSpec, Mode, Route, Usage

MODEL = "tiny"
CONTEXT_LENGTH = 1000
ROUTE = Route(Mode.DISAGGREGATED, "auto: 37 of 512 uncached tokens", arm="blue")

Step = Delta | Exception | asyncio.Event
"""What a script holds: something to give, something to raise, or a gate to wait at."""


def answer(*texts: str, finish: FinishReason = FinishReason.STOP, cached: int = 0) -> list[Step]:
    """A script that gives the texts, one delta each, and ends well."""
    deltas = [Delta(text) for text in texts]
    deltas[-1].finish_reason = finish
    deltas[-1].usage = Usage(7, len(texts), cached)
    return list(deltas)


def served(
    model: ModelConfig | None = None,
    defaults: Defaults | None = None,
    parser: ChatParser | None = None,
) -> dict[str, ServedModel]:
    config = CoordinatorConfig(models=(model or ModelConfig(name=MODEL),))
    name = config.models[0].name
    parsers = {} if parser is None else {name: parser}
    return build(
        config, {name: ByteEncoder(CONTEXT_LENGTH)}, {name: defaults or Defaults()}, parsers
    )


def gateway_without_fleet(
    config: GatewayConfig, keys: KeyRing, models: Mapping[str, ServedModel]
) -> Gateway:
    metrics = CoordinatorMetrics(CollectorRegistry())
    return Gateway(config, keys, models, Fleet({}, 1, RealClock(), 2.0), metrics)


@dataclass(slots=True)
class Seen:
    """One request as it reached the dispatcher."""

    spec: GenerateSpec
    caller: Caller
    record: RequestRecord


class FakeStream:
    """`closed` is set by the first `aclose`; `forwards` tells that text may go the short way."""

    def __init__(self, steps: Sequence[Step], route: Route, on_close: Callable[[], None]) -> None:
        self.route = route
        self.prompt_token_ids = tuple(range(3, 10))
        self.closed = asyncio.Event()
        self.forwards = False
        self.steps = list(steps)
        self._on_close = on_close

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    def forward(self, write: Callable[[str], bool]) -> None:
        """Every delta is iterated over all the same."""
        self.forwards = True

    async def __anext__(self) -> Delta:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                return step
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self._on_close()


class FakeObserver:
    """The ends that were reported: (request id, label of the error or "ok")."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.ends: list[tuple[str, str]] = []

    def done(self, record: RequestRecord, error: PdserveError | None) -> None:
        if record.done:
            return
        record.done = True
        self.ends.append((record.request_id, "ok" if error is None else error.reason.label))
        self.ended.set()


class FakeDispatcher:
    """Runs `script` for each request; a step before the first delta holds `open` up or fails it.

    `refusals` are raised first, one a request.
    """

    def __init__(
        self, observer: FakeObserver, models: dict[str, ServedModel] | None = None
    ) -> None:
        self.models = served() if models is None else models
        self.script: list[Step] = answer("Hello", " world")
        self.refusals: list[PdserveError] = []
        self.route = ROUTE
        self.seen: list[Seen] = []
        self.streams: list[FakeStream] = []
        self.opening = asyncio.Event()
        self.open_cancelled = asyncio.Event()
        self._observer = observer

    async def open(self, spec: GenerateSpec, caller: Caller, record: RequestRecord) -> FakeStream:
        self.seen.append(Seen(spec, caller, record))
        self.opening.set()
        steps = [*self.refusals[:1], *self.script]
        del self.refusals[:1]
        try:
            while steps and not isinstance(steps[0], Delta):
                step = steps.pop(0)
                if isinstance(step, Exception):
                    raise step
                assert isinstance(step, asyncio.Event)
                await step.wait()
        except PdserveError as error:
            self._observer.done(record, error)
            raise
        except asyncio.CancelledError:
            self.open_cancelled.set()
            raise
        stream = FakeStream(steps, self.route, lambda: self._observer.done(record, None))
        self.streams.append(stream)
        return stream


@dataclass(slots=True)
class FakeOps:
    is_ready: bool = True
    state: dict[str, Any] = field(default_factory=lambda: {"routes": {"tiny": {"colocated": True}}})
    drained: list[tuple[str, float]] = field(default_factory=list)
    asked: list[tuple[str, float, float]] = field(default_factory=list)

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return self.is_ready, self.state

    def fleet(self) -> dict[str, Any]:
        return {"workers": []}

    def requests(self) -> dict[str, Any]:
        return {"recent": [], "slowest": []}

    async def dashboard(self) -> dict[str, Any]:
        nothing = {"bounds": [], "modes": {}}
        return {
            "fleet": {"ready": True, "workers": [], "pairs": [], "requests": {}},
            "requests": self.requests(),
            "experiments": [],
            "traffic": {"requests": [], "ttft": nothing, "itl": nothing},
        }

    def request(self, request_id: str) -> dict[str, Any]:
        return {"request_id": request_id}

    def experiments(self) -> list[dict[str, Any]]:
        return [{"model": "tiny"}]

    def experiment(self, model: str) -> dict[str, Any]:
        return {"model": model}

    def start_experiment(self, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": model, **asked}

    def stop_experiment(self, model: str) -> dict[str, Any]:
        return {"model": model, "running": False}

    async def drain(self, worker_id: str, deadline_s: float) -> dict[str, Any]:
        self.drained.append((worker_id, deadline_s))
        return {"worker": worker_id, "unfinished": 0}

    async def usage(self, by: str, since_s: float, until_s: float) -> dict[str, Any]:
        self.asked.append((by, since_s, until_s))
        return {"rows": []}

    def metrics(self) -> bytes:
        return b"pdserve_requests_total 1\n"
