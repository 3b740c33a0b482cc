"""A coordinator that dies or stands still: what it asked for is freed, and another carries on."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest

from pdserve.config import SimConfig
from pdserve.types import Role
from tests.support.asking import LONG_TEXT
from tests.support.coordinator_process import Running, coordinator
from tests.support.patience import WITHIN_S, happens, within
from tests.support.sim_fleet import MODEL
from tests.support.worker_process import idle, worker_process

FREED_WITHIN_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: 7.0}
"""Nothing and five seconds to notice, half a second until a load report says so, and a process's
own."""

READER = SimConfig(prefill_token_s=0.005, chunk_tokens=16)
"""Takes a quarter of a minute to read VERY_LONG_TEXT."""
VERY_LONG_TEXT = LONG_TEXT * 4
WRITER = SimConfig(prefill_token_s=0.0, decode_step_s=0.01)


async def ask(address: str, mode: str, prompt: str, max_tokens: int) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
        return await client.post(
            f"http://{address}/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
            headers={"x-pdserve-mode": mode},
        )


async def ready(running: Running) -> str:
    address: str = (await running.wait_for("listening"))["http"]
    await running.wait_for("ready")
    return address


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_it_asked_for_is_freed_and_another_carries_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with AsyncExitStack() as stack:
        # Each takes a while to start.
        reader, writer = await asyncio.gather(
            stack.enter_async_context(worker_process(tmp_path, "p", Role.PREFILL, READER)),
            stack.enter_async_context(worker_process(tmp_path, "d", Role.DECODE, WRITER)),
        )
        listed = [reader.address, writer.address]
        first, second = [
            await stack.enter_async_context(coordinator(tmp_path, listed, name=name))
            for name in ("first", "second")
        ]
        addresses = await asyncio.gather(ready(first), ready(second))
        asking = [
            asyncio.create_task(ask(addresses[0], "colocated", "Hello", 5000)),
            asyncio.create_task(ask(addresses[0], "disaggregated", VERY_LONG_TEXT, 4)),
        ]
        await reader.until(lambda load: load.running > 0)
        await writer.until(lambda load: load.running > 0 and load.reserved_tokens > 5000)
        first.process.send_signal(number)
        async with within(FREED_WITHIN_S[number]):
            for worker in (reader, writer):
                await worker.until(idle)
        modes = ["colocated", "disaggregated"]
        answers = [await ask(addresses[1], mode, "Hi", 4) for mode in modes]
        assert [answer.headers["x-pdserve-mode"] for answer in answers] == modes
        assert {answer.status_code for answer in answers} == {200}
        if number is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)

            async def answers_again() -> bool:
                return (await ask(addresses[0], "disaggregated", "Hi", 4)).status_code == 200

            # Its workers are found lost, and proven anew.
            assert await happens(answers_again, WITHIN_S, 0.1)
        for task in asking:
            task.cancel()
            with suppress(httpx.TransportError, asyncio.CancelledError):
                await task
