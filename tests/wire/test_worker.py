"""The life of a worker process: start, ready, drain, death."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli import worker as worker_module
from cli.worker import run_worker
from pdserve.channel import KEEPALIVE_OPTIONS, channel
from pdserve.config import Settings
from pdserve.engine.sim import SimEngine
from pdserve.errors import ConfigError, DecodeError, ErrorReason
from pdserve.fleet_key import call_metadata
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.grpc_servers import serve
from tests.support.sim_worker import SessionClient, request

LONG = 4_000
FAST = {"decode_step_s": 0.001, "prefill_token_s": 0.0}


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def settings(fleet: Mapping[str, Any] | None = None, **worker: Any) -> Settings:
    given = {"engine": "sim", "roles": ["prefill", "decode"], "sim": FAST, **worker}
    return Settings(worker=given, fleet=fleet or {})


@dataclass
class Running:
    """A worker inside the test's process; `task` ends when it does."""

    task: asyncio.Task[None]
    ready: dict[str, str]
    channel: grpc.aio.Channel


@asynccontextmanager
async def running(given: Settings) -> AsyncIterator[Running]:
    ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_worker(given, started=ready.set_result))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await task
    async with channel(ready.result()["grpc"]) as opened:
        yield Running(task, ready.result(), opened)
    if not task.done():
        stop()
        await task


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_ready_worker_is_serving_and_stops_when_asked() -> None:
    async with running(settings(id="w-7")) as worker:
        assert worker.ready["event"] == "ready"
        assert worker.ready["worker_id"] == "w-7"
        info = await WorkerServiceStub(worker.channel).GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest()
        )
        assert info.worker_id == "w-7"
        health = health_pb2_grpc.HealthStub(worker.channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        session = SessionClient(worker.channel)
        assert len((await session.run(request(max_tokens=5))).token_ids) == 5
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{worker.ready['metrics']}/metrics")).text
        assert 'pdserve_sequences_total{outcome="finished",role="decode"} 1.0' in text


async def test_stopping_lets_running_sequences_end_and_refuses_new_ones() -> None:
    async with running(settings()) as worker:
        session = SessionClient(worker.channel)
        health = health_pb2_grpc.HealthStub(worker.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await session.start(1, request(max_tokens=300))
        await session.read()
        stop()
        told = (await watch.read()).status
        assert told == health_pb2.HealthCheckResponse.NOT_SERVING
        await session.start(2, request())
        failure = (await session.answer(2)).failure
        assert failure is not None
        assert failure.reason is ErrorReason.DRAINING
        assert len((await session.answer(1)).token_ids) == 300
        await worker.task
        assert not await session.read()


async def test_a_second_signal_ends_the_drain() -> None:
    async with running(settings(drain_s=600)) as worker:
        session = SessionClient(worker.channel)
        load = WorkerServiceStub(worker.channel).WatchLoad(worker_pb2.WatchLoadRequest())
        await session.start(1, request(max_tokens=LONG))
        await session.read()
        stop()
        while not (await load.read()).draining:
            pass
        stop()
        await asyncio.wait_for(worker.task, 60)


async def test_a_dead_engine_fails_its_sequences_and_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines: list[SimEngine] = []

    class Recorded(SimEngine):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            engines.append(self)

    monkeypatch.setattr(worker_module, "SimEngine", Recorded)
    async with running(settings()) as worker:
        session = SessionClient(worker.channel)
        await session.start(1, request(max_tokens=LONG))
        await session.read()
        engines[0].fail("the engine died")
        failure = (await session.answer(1)).failure
        assert failure is not None
        assert failure.reason is ErrorReason.DECODE_FAILED
        with pytest.raises(DecodeError, match="the engine died"):
            await worker.task


async def test_a_worker_demands_the_fleet_key_for_calls_and_metrics(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("key\n")
    async with running(settings(fleet={"key_file": file})) as worker:
        stub = WorkerServiceStub(worker.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), metadata=call_metadata("key"))
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://{worker.ready['metrics']}/metrics")
        assert answer.status_code == 401


@pytest.mark.parametrize("listen", ["grpc", "metrics"])
async def test_a_worker_does_not_start_open_to_the_network(listen: str) -> None:
    with pytest.raises(ConfigError, match="without a fleet key"):
        await run_worker(settings(**{listen: {"host": "0.0.0.0"}}))


def test_a_process_says_ready_in_one_line_and_ends_well() -> None:
    process = start("--port", "0")
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert set(ready) == {"event", "worker_id", "grpc", "metrics"}
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest) == (0, "")
    assert all(json.loads(line) for line in errors.splitlines())


def test_a_peer_that_hangs_is_given_ten_seconds_at_most() -> None:
    options = dict(KEEPALIVE_OPTIONS)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 10_000
    # One of gRPC's own pings may be under way, which is waited for first.
    assert options["grpc.http2.ping_timeout_ms"] <= options["grpc.keepalive_timeout_ms"]


async def test_a_worker_that_hangs_is_noticed() -> None:
    process = start("--port", "0")
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.to_thread(process.stdout.readline))
        async with channel(ready["grpc"]) as opened:
            session = SessionClient(opened)
            await session.run(request(max_tokens=1))
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(session.read(), 60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        process.communicate()


async def test_a_taken_port_ends_the_process_with_one_line() -> None:
    async with serve() as server:
        port = server.address.rpartition(":")[2]
        process = await asyncio.to_thread(start, "--port", port)
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        f"pdserve: error: cannot listen on 127.0.0.1:{port}: address already in use"
    )
    assert "Traceback" not in errors


def start(*flags: str) -> subprocess.Popen[str]:
    code = "from cli.main import app; app()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "worker", "--engine", "sim", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
