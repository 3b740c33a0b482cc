"""The real engine is an Engine: one in this process, fed by the fleet's prefill worker."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from coordinator.worker_client import GrpcWorkerClient, PrefillCall
from pdserve import models
from pdserve.cached_blocks import CachedBlocks
from pdserve.channel import channel
from pdserve.engine.base import (
    Admitted,
    Engine,
    EngineInfo,
    EngineLoad,
    Prefilled,
    StepListener,
    StepStats,
)
from pdserve.engine.vllm import VllmEngine
from pdserve.engine.vllm_args import VllmEngineConfig
from pdserve.errors import DecodeError, ErrorReason
from pdserve.structured import Choice, Constraint, Grammar, JsonSchema, Regex, StructuralTag
from pdserve.types import Delta, EngineRequest, KvDescriptor, LeaseEnd, Load, Role, WorkerInfo
from tests.contract.asking import Prompt, request, run, text_of
from tests.contract.engine_contract import EngineContract
from tests.support.fleet import Fleet
from tests.support.patience import within
from tests.support.prefilling import read
from tests.support.prompts import begun_again

NEWS_S = 1.0
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


class RemotePrefill:
    """The engine behind a prefill worker: every call goes through the worker's own service."""

    def __init__(self, address: str) -> None:
        self._client = GrpcWorkerClient(channel(address), None)
        self._info: WorkerInfo | None = None
        self._load = Load()
        self._news = asyncio.Event()
        self._calls: dict[KvDescriptor, PrefillCall] = {}
        self.cached = CachedBlocks()

    async def start(self, listener: StepListener) -> None:
        """The worker runs already; `listener` hears nothing."""
        self._info = await self._client.info()
        parts = self._watch(), self._watch_cache()
        self._watchers = [asyncio.create_task(part) for part in parts]
        await self._news.wait()

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._client.close()

    async def _watch(self) -> None:
        async for load in self._client.watch_load():
            self._load = load
            self._news.set()

    async def _watch_cache(self) -> None:
        async for change in self._client.watch_cache():
            self.cached.add(change.added)
            self.cached.remove(change.removed)

    @property
    def info(self) -> EngineInfo:
        info = self._info
        assert info is not None
        return EngineInfo(
            info.engine,
            info.fingerprint,
            info.context_length,
            info.kv_capacity_tokens,
            info.transports,
            info.weights,
            info.chunk_tokens,
            info.max_sequences,
        )

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self._load.running, self._load.waiting, self._load.kv_usage)

    async def generate(
        self, request: EngineRequest, kv: KvDescriptor | None
    ) -> AsyncIterator[Delta]:
        """Only makes the engine step and report, as this worker writes no answers."""
        self._news.clear()
        await self.release((await read(self, request, "nixl", 30.0)).descriptor)
        async with within(NEWS_S):
            await self._news.wait()
        for delta in ():
            yield delta

    async def prefill(
        self, request: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[Admitted | Prefilled]:
        call = self._client.prefill(request, transport)
        early = await call.admitted()
        yield Admitted(None if early is None else early.descriptor)
        result = await call.finished()
        self._calls[result.handle.descriptor] = call
        yield Prefilled(
            result.handle.descriptor, result.cached_tokens, result.queue_s, result.prefill_s
        )

    async def renew(self, descriptor: KvDescriptor, lease_s: float) -> LeaseEnd | None:
        """No call of the worker's service."""
        return None if descriptor in self._calls else LeaseEnd.RELEASED

    async def release(self, descriptor: KvDescriptor) -> LeaseEnd:
        call = self._calls.pop(descriptor, None)
        if call is not None:
            call.end()
        return LeaseEnd.RELEASED

    async def check(self) -> None:
        await self._client.info()


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def prefill_engine(fleet: Fleet) -> AsyncIterator[Engine]:
    engine = RemotePrefill(fleet.system.worker_address("prefill-0"))
    await engine.start(lambda _: None)
    yield engine
    await engine.close()


@pytest.fixture(scope="class")
def decode_steps() -> list[StepStats]:
    return []


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def decode_engine(decode_steps: list[StepStats]) -> AsyncIterator[Engine]:
    folder = models.resolve(models.DEFAULT_MODEL, print)
    engine = VllmEngine(
        VllmEngineConfig(
            folder,
            models.revision(folder),
            roles=frozenset({Role.DECODE}),
            kv_cache_gib=0.125,
            max_model_len=2_048,
            cores=str(max(os.sched_getaffinity(0))),
            enforce_eager=True,
            log_level="ERROR",
        )
    )
    await engine.start(decode_steps.append)
    yield engine
    await engine.close()


@pytest.fixture(params=["nixl", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def tokens(text: str) -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(models.DEFAULT_MODEL, print))
    return tuple(tokenizer(text).input_ids)


@pytest.fixture(scope="class")
def prompt() -> Prompt:
    """Text without near ties: in float32 the two best logits of the next forty tokens are at
    least 0.6 apart. It begins like no other test's, so that no worker has cached it."""
    return tokens(f"A contract of engines. {begun_again(50, 6, 2)}")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
class TestVllmEngine(EngineContract):
    """With the fixtures above, which are made once for the class."""

    async def test_one_rank_computes_in_the_core_process_on_the_cores_it_was_given(
        self, decode_engine: Engine
    ) -> None:
        await decode_engine.check()
        children = psutil.Process().children()
        (core,) = (child for child in children if child.name().startswith("VLLM::Engine"))
        assert core.children() == []
        assert core.cpu_affinity() == [max(os.sched_getaffinity(0))]

    @pytest.mark.parametrize(
        ("constraint", "likely"),
        [
            (Regex("[0-9]{3}-[0-9]{2}"), "417-62"),
            (Choice(("red", "blue")), "blue"),
            (Grammar('root ::= "yes" | "no"'), "no"),
            (JsonSchema('{"enum": [17]}'), "17"),
            (JsonSchema(PERSON), '{"name": "Ada", "age": 36}'),
        ],
        ids=lambda value: type(value).__name__,
    )
    async def test_an_answer_is_held_to_its_structure(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        transport: str,
        constraint: Constraint,
        likely: str,
    ) -> None:
        """The prompt has told the answer many times over, so that no other is nearly as good."""
        told = tokens(f"{likely}\n" * 20)
        asked = request(told, 60, structured_outputs=constraint, ignore_eos=False)
        colocated = text_of(await run(decode_engine, asked))
        assert colocated == likely
        salted = replace(asked, cache_salt=f"structured {transport}")
        prefilled = await read(prefill_engine, salted, transport, 30.0)
        handed = text_of(await run(decode_engine, salted, prefilled.descriptor))
        await prefill_engine.release(prefilled.descriptor)
        assert handed == colocated

    @pytest.mark.parametrize(
        "constraint", [Regex("(((("), Grammar("root ::= nothing"), StructuralTag("{}")]
    )
    async def test_a_constraint_that_does_not_compile_is_the_clients_fault(
        self, decode_engine: Engine, prompt: Prompt, constraint: Constraint
    ) -> None:
        with pytest.raises(DecodeError) as caught:
            await run(decode_engine, request(prompt, structured_outputs=constraint))
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
        assert caught.value.param == "structured_outputs"
