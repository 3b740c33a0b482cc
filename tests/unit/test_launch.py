"""How `pdserve up` starts its workers."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cli import launch, ports
from cli.child import ChildFailedError
from cli.report import JsonReporter
from cli.supervisor import Supervisor
from cli.system import Pools
from pdserve.config import LOOPBACK, Listen, load
from pdserve.errors import ConfigError
from pdserve.types import Role


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_that_is_taken_is_told(taken: int) -> None:
    assert not ports.is_free(taken)
    with pytest.raises(ConfigError, match=f"port {taken} .* already in use: .* --port"):
        ports.check(Listen(port=taken), "--port")
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid"):
        ports.check(Listen(host="no.such.host.invalid", port=1), "--port")
    picked = ports.pick(3)
    assert len(set(picked)) == 3
    assert all(map(ports.is_free, picked))


def test_no_outgoing_connection_can_take_a_port_that_was_picked() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.pick(50)) < low


@pytest.mark.parametrize("unlucky", [1, 3])
async def test_a_port_that_is_snatched_away_is_replaced_by_another(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch, unlucky: int
) -> None:
    picks = [[taken, *ports.pick(2)] for _ in range(unlucky)]
    free = ports.pick

    monkeypatch.setattr(ports, "pick", lambda count: picks.pop() if picks else free(count))
    before = set(psutil.Process().children())
    out = io.StringIO()
    reporter = JsonReporter(out=out)
    supervisor = Supervisor(reporter, tmp_path)
    settings = load(None, {"worker": {"engine": "sim"}})
    system = launch.System(settings, Pools(prefill=0, decode=1), supervisor, reporter)
    model = settings.coordinator.models[0]
    try:
        if unlucky < 3:
            worker = await system.start_worker(("decode-0", Role.DECODE), model, "0")
            assert worker["grpc"] != f"{LOOPBACK}:{taken}"
        else:
            with pytest.raises(ChildFailedError) as failed:
                await system.start_worker(("decode-0", Role.DECODE), model, "0")
            assert "address already in use" in failed.value.ending.reason[0]
    finally:
        await supervisor.stop()
        supervisor.close()
    assert set(psutil.Process().children()) <= before
    states = [json.loads(line).get("state") for line in out.getvalue().splitlines()]
    assert states == (["started", "done"] if unlucky < 3 else ["started"])
