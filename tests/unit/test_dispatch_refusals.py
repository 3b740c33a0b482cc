"""What is refused before a worker is touched, and faults of our own."""

from __future__ import annotations

import pytest

from coordinator.lifecycle import State
from pdserve.config import GatewayConfig, ModelConfig
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.types import Prompt, Role, Truncation
from tests.support.core import GatedEncoder, running
from tests.support.fake_worker import MODEL, FakeWorker, decodes
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_an_unknown_model_is_not_found() -> None:
    async with running(*decodes()) as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open(model="unheard-of")
        assert refusal.value.reason is ErrorReason.MODEL_NOT_FOUND
        assert refusal.value.param == "model"
        assert core.record.model == ""


@on_virtual_time
async def test_without_a_worker_there_is_no_answer() -> None:
    async with running() as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open()
        assert refusal.value.reason is ErrorReason.NO_WORKER


@on_virtual_time
async def test_a_full_queue_refuses_at_once() -> None:
    gateway = GatewayConfig(max_running=1, max_queued=0)
    async with running(*decodes(), gateway=gateway) as core:
        first = await core.open()
        with pytest.raises(RejectedError) as refusal:
            await core.open()
        assert refusal.value.reason is ErrorReason.QUEUE_FULL
        await first.aclose()
        await core.ask()


@on_virtual_time
async def test_a_used_up_rate_refuses() -> None:
    async with running(*decodes(), gateway=GatewayConfig(rate="1/hour")) as core:
        await core.ask()
        with pytest.raises(RejectedError) as refusal:
            await core.ask()
        assert refusal.value.reason is ErrorReason.RATE_LIMITED
        assert core.verbs == []


@on_virtual_time
async def test_models_queue_apart() -> None:
    models = (ModelConfig(name=MODEL), ModelConfig(name="other"))
    workers = *decodes(), FakeWorker("o", Role.DECODE, model="other")
    gateway = GatewayConfig(max_running=1, max_queued=0)
    async with running(*workers, models=models, gateway=gateway) as core:
        first = await core.open()
        await core.ask(model="other")
        await first.aclose()


class BrokenEncoder(GatedEncoder):
    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        raise RuntimeError("a fault")


@on_virtual_time
async def test_a_fault_of_our_own_is_counted_and_gives_everything_back() -> None:
    async with running(*decodes()) as core:
        object.__setattr__(core.models[MODEL], "encoder", BrokenEncoder())
        with pytest.raises(RuntimeError):
            await core.open()
        assert core.access[-1]["outcome"] == "internal"
        assert core.record.state is State.FAILED


@on_virtual_time
async def test_a_text_that_cannot_be_encoded_is_refused() -> None:
    async with running(*decodes()) as core:
        with pytest.raises(PdserveError) as refusal:
            await core.open("\ud800")
        assert refusal.value.reason is ErrorReason.INVALID_ARGUMENT
