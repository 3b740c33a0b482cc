"""The systems that are compared, each started whole, ready to be measured."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from measure.processes import START_S, BenchError, Child, child, free_ports, python
from measure.token_path.answers import HttpReader, Tally
from measure.token_path.jobs import PACED, QUICK, STEP_S, Cores, Source, Target
from measure.token_path.sse import AnswerError
from pdserve import config
from pdserve.config import (
    CoordinatorConfig,
    GatewayConfig,
    Listen,
    ModelConfig,
    Settings,
    SimConfig,
    WorkerConfig,
)

_POLL_S = 0.05
_STEPS_S = {PACED: STEP_S, QUICK: 0.0}


@dataclass(frozen=True, slots=True)
class System:
    """`start` gives the target for as long as its context lasts."""

    name: str
    start: Callable[[Cores], AbstractAsyncContextManager[Target]]


@asynccontextmanager
async def _pdserve(cores: Cores) -> AsyncIterator[Target]:
    async with (
        _worker(PACED, cores.others) as paced,
        _worker(QUICK, cores.others) as quick,
        _pdserve_process("coordinator", cores.router, _coordinator(paced, quick)) as coordinator,
    ):
        listening = await coordinator.event("listening")
        await coordinator.event("ready")
        yield Target(listening["http"], coordinator.pids, Source("grpc", paced, quick))


@asynccontextmanager
async def _worker(model: str, core: int) -> AsyncIterator[str]:
    """A decode worker on the simulated engine; gives its address."""
    sim = SimConfig(
        prefill_token_s=0.0,
        decode_step_s=_STEPS_S[model],
        kv_capacity_tokens=2**24,
        max_num_seqs=1024,
    )
    settings = Settings(worker=WorkerConfig(id=model, model=_model(model), engine="sim", sim=sim))
    async with _pdserve_process("decode", core, settings) as worker:
        ready = await worker.event("ready")
        yield ready["grpc"]


def _model(name: str) -> ModelConfig:
    return ModelConfig(name=name, tokenizer="bytes")


def _coordinator(*workers: str) -> Settings:
    return Settings(
        coordinator=CoordinatorConfig(
            http=Listen(),
            grpc=Listen(),
            workers=workers,
            models=(_model(PACED), _model(QUICK)),
            gateway=GatewayConfig(max_running=1024),
        )
    )


@asynccontextmanager
async def _pdserve_process(verb: str, core: int, settings: Settings) -> AsyncIterator[Child]:
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config.dump(settings))
        program = python("cli.main", verb, "--config", str(file))
        async with child(f"pdserve {verb}", core, program) as running:
            yield running


@asynccontextmanager
async def _vllm_router(cores: Cores) -> AsyncIterator[Target]:
    async with (
        _fake(cores.others) as fake,
        _router_process(cores.router, "--worker-urls", f"http://{fake}") as target,
    ):
        yield target(fake)


@asynccontextmanager
async def _vllm_router_pd(cores: Cores) -> AsyncIterator[Target]:
    async with (
        _fake(cores.others) as prefill,
        _fake(cores.others) as decode,
        _router_process(
            cores.router,
            "--vllm-pd-disaggregation",
            *("--prefill", f"http://{prefill}"),
            *("--decode", f"http://{decode}"),
        ) as target,
    ):
        yield target(decode)


@asynccontextmanager
async def _fake(core: int) -> AsyncIterator[str]:
    async with child("fake vLLM server", core, python("measure.token_path.fake")) as fake:
        ready = await fake.event("ready")
        yield ready["http"]


@asynccontextmanager
async def _router_process(core: int, *arguments: str) -> AsyncIterator[Callable[[str], Target]]:
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        raise BenchError(f"there is no {program}: install requirements/bench.txt")
    port, metrics_port = map(str, free_ports(2))
    options = ("--policy", "round_robin", "--log-level", "error", "--port", port)
    checks = ("--worker-startup-check-interval", "1", "--prometheus-port", metrics_port)
    command = (str(program), *arguments, *options, *checks)
    async with child("vllm-router", core, command, is_read=False) as router:
        address = f"127.0.0.1:{port}"
        await _until_it_answers(router, address)
        yield lambda fake: Target(address, router.pids, Source("http", fake, fake))


async def _until_it_answers(router: Child, address: str) -> None:
    """Raises BenchError if no answer comes through within START_S."""
    try:
        async with asyncio.timeout(START_S):
            while not await _answers(address):
                if router.ended:
                    raise router.error("ended")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise router.error(f"did not answer within {START_S:.0f} s") from None


async def _answers(address: str) -> bool:
    try:
        reader = await HttpReader.connect(address)
    except OSError:
        return False
    try:
        await reader.answer(QUICK, 1, Tally())
    except AnswerError:
        return False
    finally:
        await reader.close()
    return True


PDSERVE = System("pdserve", _pdserve)
VLLM_ROUTER = System("vllm-router", _vllm_router)
VLLM_ROUTER_PD = System("vllm-router, PD mode", _vllm_router_pd)
SYSTEMS = (PDSERVE, VLLM_ROUTER, VLLM_ROUTER_PD)
