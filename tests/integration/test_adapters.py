"""LoRA adapters by model name: over HTTP and gRPC, on both routes, with caches of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdserve.client import AsyncClient, CallError, GenerateRequest, RequestOptions, SamplingParams
from pdserve.errors import ErrorReason
from pdserve.types import Mode, Role
from pdserve.v1.generation_pb2 import MODE_DISAGGREGATED
from tests.support.asking import TEXT, body
from tests.support.http_facade import assert_error
from tests.support.sim_fleet import MODEL, SimFleet, SimFleetWorker, coordinator, sim_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

LORA = {"french": "/adapters/french", "terse": "/adapters/terse"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    workers = [
        SimFleetWorker(name, role, adapters=tuple(LORA))
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    async with sim_fleet(*workers, lora=LORA) as running:
        yield running


async def ask(fleet: SimFleet, model: str, mode: Mode, **fields: Any) -> Any:
    response = await fleet.coordinator.http.post(
        "/v1/completions",
        json=body(TEXT, **fields) | {"model": model},
        headers={"x-pdserve-mode": mode},
    )
    assert response.headers["x-pdserve-mode"] == mode
    assert response.json()["model"] == model
    return response.json()


async def test_an_adapter_is_a_model_of_its_own(fleet: SimFleet) -> None:
    listed = (await fleet.coordinator.http.get("/v1/models")).json()["data"]
    parents = {card["id"]: card["parent"] for card in listed}
    assert parents == {"french": MODEL, "terse": MODEL, MODEL: None}
    one = (await fleet.coordinator.http.get("/v1/models/french")).json()
    assert (one["id"], one["parent"]) == ("french", MODEL)


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.DISAGGREGATED])
async def test_each_answers_in_its_own_way_and_from_its_own_cache(
    fleet: SimFleet, mode: Mode
) -> None:
    salt = f"of this test, {mode}"
    models = (MODEL, *LORA)
    answers = [await ask(fleet, model, mode, cache_salt=salt) for model in models]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts)) == len(models)
    for answer in answers:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await ask(fleet, "french", mode, cache_salt=salt)
    assert again["choices"][0]["text"] == texts[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_both_routes_answer_alike_over_grpc_too(fleet: SimFleet) -> None:
    expected = await ask(fleet, "french", Mode.COLOCATED)
    handed = await ask(fleet, "french", Mode.DISAGGREGATED)
    assert handed["choices"][0]["text"] == expected["choices"][0]["text"]
    async with AsyncClient(fleet.coordinator.addresses["grpc"]) as client:
        answer = await client.generate(
            GenerateRequest(
                model="french",
                text=TEXT,
                sampling=SamplingParams(max_tokens=12, temperature=0),
                options=RequestOptions(mode=MODE_DISAGGREGATED),
            )
        )
        assert answer.text == expected["choices"][0]["text"]
        models = {model.name: model.parent for model in await client.list_models()}
        assert models == {"french": MODEL, "terse": MODEL, MODEL: ""}
        with pytest.raises(CallError) as caught:
            await client.generate(GenerateRequest(model="german", text=TEXT))
    assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND


async def test_an_adapter_that_there_is_not(fleet: SimFleet) -> None:
    response = await fleet.coordinator.http.post(
        "/v1/completions", json=body(TEXT) | {"model": "german"}
    )
    assert_error(response, 404, "model_not_found", "model")


async def test_answers_are_counted_by_the_adapters_name(fleet: SimFleet) -> None:
    before = fleet.coordinator.metric("requests_total", model="terse", outcome="ok")
    await ask(fleet, "terse", Mode.COLOCATED)
    assert fleet.coordinator.metric("requests_total", model="terse", outcome="ok") == before + 1


async def test_a_worker_without_the_adapters_gets_no_traffic() -> None:
    worker = SimFleetWorker("d", Role.DECODE, adapters=("french",))
    await worker.start()
    async with coordinator([worker], lora=LORA).running() as started:
        (found,) = started.fleet.workers()
        await started.until(lambda: found.detail == "lacks the LoRA adapters terse")
        assert not started.ops.ready()[0]
    await worker.kill()
