"""Where workers are found, and what the fleet makes of those that come and go."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

from coordinator.discovery import LOOK_S, Discovery, find
from coordinator.fleet import LEAVE_S, Fleet
from coordinator.policy.health import WorkerState
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig
from pdserve.errors import ConfigError, RejectedError
from pdserve.sources import DnsName, FixedAddress, WatchedFile, parse_source
from pdserve.types import Load, Role
from tests.support.core import Core, running
from tests.support.fake_script import Gate, first_delta
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.patience import WITHIN_S
from tests.support.virtual_time import on_virtual_time, settle

# The configuration.


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("w1:7000", FixedAddress("w1:7000")),
        ("[::1]:7000", FixedAddress("[::1]:7000")),
        ("dns:decode.ns.svc:7000", DnsName("decode.ns.svc", 7000)),
        ("file:/etc/workers.yaml", WatchedFile(Path("/etc/workers.yaml"))),
    ],
)
def test_a_source(text: str, source: object) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    ["", "w1", "w1:", ":7000", "w1:0", "w1:65536", "w1:x", "::1:7000", "http://w1:7000", "dns:w1",
     "dns::7000", "file:", "w1:\u0667"],
)  # fmt: skip
def test_what_is_no_source_is_refused_when_the_configuration_is_read(text: str) -> None:
    with pytest.raises(ValueError, match="workers"):
        CoordinatorConfig(workers=(text,))


# What a source finds.

_V4, _V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(
    ("answers", "addresses"),
    [
        ([(_V4, "10.0.0.1"), (_V4, "10.0.0.2")], {"10.0.0.1:7000", "10.0.0.2:7000"}),
        ([(_V6, "fd00::1"), (_V6, "fd00::2")], {"[fd00::1]:7000", "[fd00::2]:7000"}),
        # One worker with both must not be two.
        ([(_V6, "fd00::1"), (_V4, "10.0.0.1")], {"[fd00::1]:7000"}),
    ],
)
@on_virtual_time
async def test_every_address_of_a_name(answers: list[tuple[int, str]], addresses: set[str]) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("decode", 7000)
        return [(family, 1, 6, "", (address, port)) for family, address in answers]

    with mock.patch.object(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo):
        assert await find(DnsName("decode", 7000)) == addresses


async def test_a_name_is_looked_up_as_the_system_does() -> None:
    assert await find(DnsName("localhost", 7000)) in ({"127.0.0.1:7000"}, {"[::1]:7000"})


@pytest.mark.parametrize(
    ("content", "addresses"),
    [
        ("- w1:7000\n- w2:7000\n", {"w1:7000", "w2:7000"}),
        (json.dumps(["w1:7000"]), {"w1:7000"}),
        ("[]", set()),
    ],
)
async def test_a_file_is_a_list_in_yaml_or_json(
    tmp_path: Path, content: str, addresses: set[str]
) -> None:
    path = tmp_path / "workers"
    path.write_text(content)
    assert await find(WatchedFile(path)) == addresses


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "does not hold a list of host:port"),
        ("workers: [w1:7000]", "does not hold a list of host:port"),
        ("- w1", "'w1' is not host:port"),
        ("- 7000", "7000 is not host:port"),
        ("- [", "expected"),
        ("- file:/etc/passwd", "is not host:port"),
    ],
)
@on_virtual_time
async def test_a_file_that_cannot_be_understood_at_the_start_is_told(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "workers"
    if content is not None:
        path.write_text(content)
    fleet = Fleet({}, 3, RealClock())
    with pytest.raises(ConfigError, match=words):
        Discovery([f"file:{path}"], fleet, FakeWorker)


# Over time.


class Names:
    """A name server: what each name is now; an error is raised."""

    def __init__(self) -> None:
        self.now: dict[str, list[str] | OSError] = {}

    async def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        answer = self.now[host]
        if isinstance(answer, OSError):
            raise answer
        return [(_V4, 1, 6, "", (address, port)) for address in answer]


async def discovered(
    check: Callable[[Core, Names, dict[str, FakeWorker]], Awaitable[None]],
) -> None:
    """Runs a fleet whose decode workers are those of the name `d`, at first 10.0.0.1 alone."""
    names, made = Names(), dict[str, FakeWorker]()
    names.now["d"] = ["10.0.0.1"]

    def connect(address: str) -> FakeWorker:
        made[address] = FakeWorker(address.partition(":")[0], Role.DECODE)
        return made[address]

    with (
        mock.patch.object(asyncio.get_running_loop(), "getaddrinfo", names),
        mock.patch("coordinator.discovery.log", structlog.get_logger()),
    ):
        async with running() as core:
            looking = asyncio.create_task(Discovery(["dns:d:1"], core.fleet, connect).run())
            await settle()
            await check(core, names, made)
            looking.cancel()


def serving(core: Core) -> list[str]:
    return [view.worker_id for view in core.fleet.snapshot(MODEL).decode]


@on_virtual_time
async def test_a_worker_that_appears_is_proven_and_serves() -> None:
    async def check(core: Core, names: Names, made: dict[str, FakeWorker]) -> None:
        assert serving(core) == ["10.0.0.1"]
        names.now["d"] = ["10.0.0.1", "10.0.0.2"]
        await asyncio.sleep(LOOK_S)
        await settle()
        assert serving(core) == ["10.0.0.1", "10.0.0.2"]
        assert core.ops.ready()[0]

    await discovered(check)


@on_virtual_time
async def test_a_worker_that_is_not_listed_any_more_ends_its_work_and_is_forgotten() -> None:
    async def check(core: Core, names: Names, made: dict[str, FakeWorker]) -> None:
        worker, gate = made["10.0.0.1:1"], Gate()
        worker.starts.append([first_delta(), gate])
        stream = await core.open()
        names.now["d"] = ["10.0.0.2"]
        await asyncio.sleep(LOOK_S)
        await settle()
        assert serving(core) == ["10.0.0.2"]
        assert core.worker("10.0.0.1").state is WorkerState.DRAINING
        await asyncio.sleep(60)
        assert not worker.closed
        gate.open()
        assert [delta async for delta in stream][-1].finish_reason is not None
        await stream.aclose()
        worker.report(Load(open_leases=1))
        await asyncio.sleep(10)
        assert not worker.closed, "it still holds a prompt for somebody"
        worker.report(Load())
        await asyncio.sleep(3 * LEAVE_S)
        assert worker.closed
        assert [entry.info.worker_id for entry in core.fleet.workers() if entry.info] == [
            "10.0.0.2"
        ]

    await discovered(check)


@on_virtual_time
async def test_a_worker_that_is_listed_again_in_time_stays() -> None:
    async def check(core: Core, names: Names, made: dict[str, FakeWorker]) -> None:
        worker, gate = made["10.0.0.1:1"], Gate()
        worker.starts.append([first_delta(), gate])
        stream = await core.open()
        names.now["d"] = ["10.0.0.2"]
        await asyncio.sleep(LOOK_S)
        names.now["d"] = ["10.0.0.1"]
        await asyncio.sleep(LOOK_S)
        await settle()
        assert serving(core) == ["10.0.0.1"]
        gate.open()
        assert [delta async for delta in stream][-1].finish_reason is not None
        await stream.aclose()
        assert not worker.closed

    await discovered(check)


@on_virtual_time
async def test_a_worker_that_is_gone_when_it_is_not_listed_any_more_is_forgotten() -> None:
    async def check(core: Core, names: Names, made: dict[str, FakeWorker]) -> None:
        made["10.0.0.1:1"].stop()
        names.now["d"] = ["10.0.0.2"]
        await asyncio.sleep(LOOK_S + 2 * LEAVE_S)
        assert [entry.info.worker_id for entry in core.fleet.workers() if entry.info] == [
            "10.0.0.2"
        ]

    await discovered(check)


@pytest.mark.parametrize("answer", [OSError("the name server is away"), []])
@on_virtual_time
async def test_what_cannot_be_looked_up_takes_nobody_out(answer: list[str] | OSError) -> None:
    async def check(core: Core, names: Names, made: dict[str, FakeWorker]) -> None:
        names.now["d"] = answer
        await asyncio.sleep(10 * LOOK_S)
        assert serving(core) == ["10.0.0.1"]
        names.now["d"] = ["10.0.0.1"]
        await asyncio.sleep(2 * LOOK_S)
        told = [entry["event"] for entry in core.logs if "be looked up" in entry["event"]]
        assert told == ["workers cannot be looked up", "workers can be looked up again"]

    await discovered(check)


@on_virtual_time
async def test_before_anybody_is_found_the_coordinator_is_not_ready() -> None:
    async with running() as core:
        assert not core.ops.ready()[0]
        with pytest.raises(RejectedError, match="no decode worker is ready"):
            await core.ask()


async def test_a_watched_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("[w1:1]")
    made: dict[str, FakeWorker] = {}

    class Quick(RealClock):
        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(0.01)

    def connect(address: str) -> FakeWorker:
        made[address] = FakeWorker(address, Role.DECODE)
        return made[address]

    fleet = Fleet({}, 3, Quick())
    tasks = [
        asyncio.create_task(part)
        for part in (fleet.run(), Discovery([f"file:{path}"], fleet, connect).run())
    ]

    async def until(*addresses: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while {
                worker.info.worker_id for worker in fleet.workers() if worker.info is not None
            } != set(addresses):
                fleet.changed.clear()
                await fleet.changed.wait()

    await until("w1:1")
    path.write_text("[w1:1, w2:1]")
    await until("w1:1", "w2:1")
    path.write_text("[w2:1]")
    await until("w2:1")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(worker.closed for worker in made.values())
