"""The real coordinator, below its HTTP, and its workers, on a simulated network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from itertools import product
from typing import Any, NoReturn

import structlog
from prometheus_client import CollectorRegistry

from coordinator import catalog
from coordinator.dispatch import Dispatcher
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller, KeyRing
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.policy.pairs import pairs_of
from coordinator.proving import Prover
from coordinator.record import RequestRecord
from coordinator.response import ResponseStream
from coordinator.worker_client import GrpcWorkerClient
from measure.simulation.network import Host, Network
from measure.simulation.rpc import Channel
from measure.simulation.worker import MODEL, SimWorker, WorkerSpec
from pdserve.config import CoordinatorConfig, GatewayConfig, ModelConfig
from pdserve.types import GenerateSpec, Prompt, Role, TextPrompt, TokenPrompt, Truncation

_CALLER_KEYS = KeyRing.open_to_all(admin=True)


class TokenEncoder:
    """Takes token ids as they are; one token for each character of a text."""

    vocab_size = 1 << 31

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length

    def encode(self, prompt: Prompt, truncation: Truncation | None = None) -> tuple[int, ...]:
        assert truncation is None
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        assert isinstance(prompt, TextPrompt)
        return tuple(map(ord, prompt.text))

    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        return self.encode(prompt, truncation)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))

    def token_strings(self, token_ids: tuple[int, ...]) -> list[str]:
        return list(map(chr, token_ids))

    def is_whole(self, token_ids: tuple[int, ...]) -> bool:
        return True


class Cluster:
    """One coordinator and workers by address. `records` has every request that was asked."""

    def __init__(
        self,
        specs: dict[str, WorkerSpec],
        model: ModelConfig,
        network: Network,
        gateway: GatewayConfig,
        context_length: int,
    ) -> None:
        self.network = network
        self.host = network.add("coordinator")
        self.host.up = True
        self.workers = {name: SimWorker(network.add(name), spec) for name, spec in specs.items()}
        config = CoordinatorConfig(models=(model,), gateway=gateway)
        self.models = catalog.build(config, {MODEL: TokenEncoder(context_length)})
        clients = {name: self._client(worker.host) for name, worker in self.workers.items()}
        self.fleet = Fleet(dict(clients), config.quarantine_after, self.host)
        metrics = CoordinatorMetrics(CollectorRegistry())
        self.gateway = Gateway(config.gateway, _CALLER_KEYS, self.models, self.fleet, metrics)
        self.observer = Observer(metrics)
        experiments = Experiments(self.models, self.fleet, metrics)
        self.dispatcher = Dispatcher(
            self.models, self.fleet, self.gateway, self.observer, experiments
        )
        self._caller: Caller = self.gateway.authenticate(None)
        self._prover = Prover(self.fleet, self.models, lambda _: None, lambda: None)

    def _client(self, worker: Host) -> GrpcWorkerClient:
        return GrpcWorkerClient(Channel(self.host, worker), None)  # type: ignore[arg-type]

    async def open(self, spec: GenerateSpec, record: RequestRecord) -> ResponseStream:
        return await self.dispatcher.open(spec, self._caller, record)

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._prover.probing

    @asynccontextmanager
    async def running(self, *, prove: bool) -> AsyncIterator[None]:
        """Without `prove`, workers and pairs are taken for proven as soon as they are met."""
        for worker in self.workers.values():
            await worker.start()
        proving = self._prover.run() if prove else _trust(self.fleet)
        tasks = [asyncio.create_task(self.fleet.run()), asyncio.create_task(proving)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for worker in self.workers.values():
                await worker.crash()


def record_of(request_id: str) -> RequestRecord:
    """The record of a request that arrives now."""
    return RequestRecord(request_id, "simulation", "completion", True, "", time.monotonic())


async def _trust(fleet: Fleet) -> None:
    while True:
        fleet.changed.clear()
        connected = [worker for worker in fleet.workers() if worker.connected]
        for worker in connected:
            worker.standing = worker.standing.probe_passed("")
        for prefill, decode in product(connected, connected):
            if not (
                prefill is decode
                or fleet.pairs.have_met(prefill.process, decode.process)
                or not prefill.hosts(Role.PREFILL)
                or not decode.hosts(Role.DECODE)
            ):
                assert prefill.info is not None
                assert decode.info is not None
                for pair, refusal in pairs_of(
                    prefill.info, decode.info, None, mixed_precision=False
                ).items():
                    fleet.pairs.meet(pair, refusal)
                    fleet.pairs.probe_passed(pair, "")
        await fleet.changed.wait()


@contextmanager
def error_logs() -> Iterator[list[str]]:
    """What is logged as an error, by the coordinator and its workers; the rest is not even put
    together."""
    errors: list[str] = []

    def note(_: Any, __: str, entry: MutableMapping[str, Any]) -> NoReturn:
        errors.append(f"{entry['event']}: {entry.get('exc_info')!r}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    try:
        yield errors
    finally:
        structlog.configure(**before)
