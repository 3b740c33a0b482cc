"""Decode workers killed in mid-stream, as processes: answers are whole, and as if undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import SimConfig
from pdserve.types import Role
from tests.support.asking import TEXT, body, events
from tests.support.sim_fleet import SimCoordinator
from tests.support.worker_process import ProcessFleet, process_fleet

SLOW = SimConfig(decode_step_s=0.25)
QUICK = SimConfig(decode_step_s=0.01)
FLEET = [("p", Role.PREFILL, QUICK), ("d1", Role.DECODE, SLOW), ("d2", Role.DECODE, QUICK)]
ANSWER: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
"""Takes a quarter of a minute on the worker that is killed, long before its end."""
WAYS: list[dict[str, Any]] = [{}, {"stop": ["no such words"]}, {"seed": 7, "temperature": 1.0}]


async def chunks(
    core: SimCoordinator, text: str, mode: str, sampling: dict[str, Any]
) -> AsyncIterator[Any]:
    """Every event of a streamed answer, as it comes."""
    request = body(text, stream=True, stream_options={"include_usage": True}, **sampling)
    async with core.http.stream(
        "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield events([line])[0]


async def ask(
    core: SimCoordinator, text: str, mode: str, sampling: dict[str, Any], begun: asyncio.Event
) -> tuple[str, str, int]:
    """Text, finish reason and tokens answered."""
    seen: list[Any] = []
    async with aclosing(chunks(core, text, mode, sampling)) as answer:
        async for chunk in answer:
            seen.append(chunk)
            if len(seen) > 5:
                begun.set()
    *parts, usage, done = seen
    assert done == "[DONE]"
    choices = [part["choices"][0] for part in parts]
    return (
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["usage"]["completion_tokens"],
    )


async def kill(fleet: ProcessFleet, worker_id: str) -> None:
    worker = fleet.workers.pop(worker_id)
    worker.process.kill()
    await worker.process.wait()


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_many_answers_are_whole_though_their_worker_is_killed(
    tmp_path: Path, mode: str
) -> None:
    # In turn, so that each decode worker has half of them.
    async with process_fleet(tmp_path, *FLEET, decode_balance="round-robin") as fleet:
        core = fleet.coordinator
        asked = [(f"{TEXT} {i}", {**ANSWER, **WAYS[i % len(WAYS)]}) for i in range(12)]
        begun = [asyncio.Event() for _ in asked]
        asking = [
            asyncio.create_task(ask(core, text, mode, sampling, event))
            for (text, sampling), event in zip(asked, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await kill(fleet, "d1")
        answers = await asyncio.gather(*asking)
        assert core.metric("recoveries_total", outcome="continued") == 6
        assert answers == await asyncio.gather(
            *(ask(core, text, mode, sampling, asyncio.Event()) for text, sampling in asked)
        )
        assert core.metric("recoveries_total", outcome="failed") == 0
        assert core.metric("requests_total", outcome="ok") == 24
