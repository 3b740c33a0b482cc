"""The coordinator as a process: what it says when it starts, how it drains, how it is replaced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from pdserve.config import SimConfig
from pdserve.types import Role
from tests.support.coordinator_process import coordinator
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import FAST, MODEL, SimFleetWorker

SLOW_WRITER = SimConfig(prefill_token_s=0.0, decode_step_s=0.01)


@asynccontextmanager
async def workers(sim: SimConfig = FAST) -> AsyncIterator[list[SimFleetWorker]]:
    pool = [SimFleetWorker("p", Role.PREFILL, sim=sim), SimFleetWorker("d", Role.DECODE, sim=sim)]
    for worker in pool:
        await worker.start()
    try:
        yield pool
        async with asyncio.timeout(WITHIN_S):
            for worker in pool:
                await worker.until_idle()
    finally:
        for worker in pool:
            await worker.kill()


def where(pool: list[SimFleetWorker]) -> list[str]:
    return [worker.address for worker in pool]


async def test_it_says_what_it_proves_and_when_it_is_ready(tmp_path: Path) -> None:
    async with workers() as pool, coordinator(tmp_path, where(pool)) as running:
        ready = await running.wait_for("ready")
        events = [event["event"] for event in running.events]
        assert events == ["listening", "proving", "proving", "proving", "ready"]
        assert [event["detail"] for event in running.events if event["event"] == "proving"] == [
            "d answers a prompt by itself",
            "p hands a prompt over to d by nixl",
            "p hands a prompt over to d by grpc",
        ]
        assert ready["routes"][MODEL]["disaggregated"] == {"ready": True, "detail": ""}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_running_answers_before_it_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with workers(SLOW_WRITER) as pool, coordinator(tmp_path, where(pool)) as running:
        address = (await running.wait_for("listening"))["http"]
        await running.wait_for("ready")
        async with httpx.AsyncClient(
            base_url=f"http://{address}", trust_env=False, timeout=WITHIN_S
        ) as client:
            body = {
                "model": MODEL,
                "prompt": "Hello",
                "max_tokens": 100,
                "ignore_eos": True,
                "stream": True,
            }
            async with client.stream(
                "POST",
                "/v1/completions",
                json=body,
                headers={"x-pdserve-mode": "disaggregated"},
            ) as response:
                lines = response.aiter_lines()
                await anext(lines)
                running.process.send_signal(number)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            async with asyncio.timeout(WITHIN_S):
                assert await running.process.wait() == 0
            with pytest.raises(httpx.ConnectError):
                await client.get("/health/live")


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with workers(SLOW_WRITER) as pool, coordinator(tmp_path, where(pool)) as running:
        addresses = await running.wait_for("listening")
        await running.wait_for("ready")
        async with (
            httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client,
            grpc.aio.insecure_channel(addresses["grpc"]) as channel,
        ):
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": 5000, "ignore_eos": True}
            asking = asyncio.create_task(
                client.post(f"http://{addresses['http']}/v1/completions", json=body)
            )
            await pool[1].until(lambda load: load.running > 0)
            stub: Any = HealthStub(channel)
            health = stub.Watch(HealthCheckRequest())
            assert (await health.read()).status == HealthCheckResponse.SERVING
            running.process.send_signal(signal.SIGTERM)
            assert (await health.read()).status == HealthCheckResponse.NOT_SERVING
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WITHIN_S):
                await running.process.wait()
            await asyncio.wait([asking])
            assert asking.exception() is not None or asking.result().status_code >= 500


async def test_one_that_was_killed_is_replaced_by_another(tmp_path: Path) -> None:
    async with workers(SLOW_WRITER) as pool:
        async with coordinator(tmp_path, where(pool)) as first:
            address = (await first.wait_for("listening"))["http"]
            await first.wait_for("ready")
            async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
                body = {"model": MODEL, "prompt": "Hi", "max_tokens": 5000, "ignore_eos": True}
                asking = asyncio.create_task(
                    client.post(f"http://{address}/v1/completions", json=body)
                )
                await pool[1].until(lambda load: load.running > 0)
                first.process.kill()
                with pytest.raises(httpx.TransportError):
                    await asking
        async with coordinator(tmp_path, where(pool)) as second:
            await second.wait_for("ready")


async def test_it_says_in_one_line_why_it_cannot_start(tmp_path: Path) -> None:
    async with (
        workers() as pool,
        coordinator(tmp_path, where(pool), http={"host": "0.0.0.0"}) as running,
    ):
        async with asyncio.timeout(WITHIN_S):
            assert await running.process.wait() != 0
        told = (tmp_path / "coordinator.log").read_text()
        assert "keys_file" in told
        assert "Traceback" not in told
