"""What clients were told they used is what they are charged, whichever way they asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from coordinator.gateway.charge import Charge
from coordinator.gateway.ledger import Ledger, LedgerMetrics
from pdserve.config import SimConfig
from pdserve.config_ledger import LedgerConfig, Prices
from pdserve.types import Role
from pdserve.v1 import generation_pb2 as generation
from pdserve.v1 import inference_pb2 as inference
from tests.support.sim_fleet import FAST, MODEL, SimFleet, SimFleetWorker, sim_fleet

FOREVER = (0, 2**62)
PROMPT = "Once upon a time there was a prompt of more than four blocks of tokens, and then some."


@asynccontextmanager
async def charged_fleet(
    folder: Path, sim: SimConfig = FAST
) -> AsyncIterator[tuple[SimFleet, Ledger]]:
    ledger = Ledger(
        LedgerConfig(folder=folder),
        {MODEL: Prices(prefill=3.0, decode=2.0)},
        LedgerMetrics(CollectorRegistry()),
    )
    workers = [
        SimFleetWorker("p", Role.PREFILL, sim=sim),
        SimFleetWorker("d", Role.DECODE, sim=sim),
    ]
    async with sim_fleet(*workers, listeners=(ledger,)) as fleet:
        yield fleet, ledger
    await ledger.close()


async def told_over_http(fleet: SimFleet, name: str, mode: str, **fields: Any) -> dict[str, int]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **fields}
    headers = {"x-request-id": name, "x-pdserve-mode": mode}
    response = await fleet.coordinator.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        told: dict[str, int] = response.json()["usage"]
        return told
    *_, last, done = [line for line in response.text.splitlines() if line]
    assert done == "data: [DONE]"
    streamed: dict[str, int] = json.loads(last.removeprefix("data: "))["usage"]
    return streamed


async def told_over_grpc(fleet: SimFleet, name: str) -> dict[str, int]:
    """Of a stream, as it stands when the client reads its end."""
    request = inference.GenerateRequest(
        model=MODEL,
        text=PROMPT,
        sampling=generation.SamplingParams(max_tokens=5, ignore_eos=True),
        options=inference.RequestOptions(mode=generation.MODE_COLOCATED),
    )
    call = fleet.coordinator.grpc.GenerateStream(
        inference.GenerateStreamRequest(request=request), metadata=(("x-request-id", name),)
    )
    *_, last = [message async for message in call]
    return {
        "prompt_tokens": last.usage.prompt_tokens,
        "completion_tokens": last.usage.completion_tokens,
    }


def left_in_journal(folder: Path) -> list[str]:
    files = folder.glob("journal/*.jsonl")
    return [line for file in files for line in file.read_text().splitlines()]


def of(entries: list[Charge], name: str) -> list[Charge]:
    return [each for each in entries if each.request_id.startswith(name)]


async def test_every_way_to_ask_is_charged_what_its_usage_says(tmp_path: Path) -> None:
    async with charged_fleet(tmp_path) as (fleet, ledger):
        usage = {"stream_options": {"include_usage": True}}
        told = {
            "whole": await told_over_http(fleet, "whole", "colocated"),
            "stream": await told_over_http(fleet, "stream", "disaggregated", stream=True, **usage),
            "grpc": await told_over_grpc(fleet, "grpc"),
            "n": await told_over_http(fleet, "n", "colocated", n=3),
            "lists": await told_over_http(
                fleet, "lists", "disaggregated", prompt=[PROMPT, "Hello"], stream=True, **usage
            ),
        }
        entries = await ledger.entries(*FOREVER)
        for name, usage_told in told.items():
            mine = of(entries, name)
            assert sum(each.prompt_tokens for each in mine) == usage_told["prompt_tokens"]
            assert sum(each.completion_tokens for each in mine) == usage_told["completion_tokens"]
            assert all(each.decode_nano > 0 and each.prefill_nano > 0 for each in mine)
            assert {each.outcome for each in mine} == {"ok"}
        assert [len(of(entries, name)) for name in told] == [1, 1, 1, 3, 2]
        assert {each.mode for each in of(entries, "stream")} == {"disaggregated"}


async def test_an_answer_is_settled_before_its_end_is_told(tmp_path: Path) -> None:
    async with charged_fleet(tmp_path) as (fleet, _):
        for name, ask in (
            (
                "http",
                told_over_http(
                    fleet, "http", "colocated", stream=True, stream_options={"include_usage": True}
                ),
            ),
            ("grpc", told_over_grpc(fleet, "grpc")),
        ):
            await ask
            # Nobody posts in this test: what is there was written down by the request itself.
            assert [name in line for line in left_in_journal(tmp_path)].count(True) == 1


async def test_who_leaves_is_charged_for_what_came(tmp_path: Path) -> None:
    slow = SimConfig(prefill_token_s=0.0, decode_step_s=0.02, transfer_token_s=0.0)
    async with charged_fleet(tmp_path, slow) as (fleet, ledger):
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
        }
        with suppress(httpx.HTTPError):
            async with fleet.coordinator.http.stream(
                "POST", "/v1/completions", json=body
            ) as stream:
                lines = stream.aiter_lines()
                seen = 0
                while seen < 3:
                    seen += (await anext(lines)).startswith("data: ")
        for worker in fleet.workers.values():
            await worker.until_idle()
        (left,) = await ledger.entries(*FOREVER)
        assert (left.outcome, left.prompt_tokens) == ("cancelled", len(PROMPT))
        assert 3 <= left.completion_tokens < 500


async def test_who_is_refused_is_not_charged(tmp_path: Path) -> None:
    async with charged_fleet(tmp_path) as (fleet, ledger):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10**6}
        refused = await fleet.coordinator.http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert await ledger.entries(*FOREVER) == []
