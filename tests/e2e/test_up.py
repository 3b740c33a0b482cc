"""The life of `pdserve up`: however it ends, it leaves no process behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.patience import WITHIN_S
from tests.support.running_system import RunningSystem, assert_all_gone

SIM = ("--engine", "sim", "--port", "0", "--grpc-port", "0")


@pytest.fixture
def sim() -> Iterator[RunningSystem]:
    system = RunningSystem(*SIM)
    try:
        yield system
    finally:
        system.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_well(sim: RunningSystem, number: signal.Signals) -> None:
    sim.wait_for("ready")
    family = sim.descendants()
    assert len(family) >= 3
    sim.process.send_signal(number)
    assert sim.ended(30) == 0
    assert_all_gone(family)
    sim.wait_for("stopped")


def test_a_signal_during_the_start_ends_everything(sim: RunningSystem) -> None:
    sim.wait_for("step")
    family = sim.descendants()
    sim.process.send_signal(signal.SIGINT)
    assert sim.ended(30) == 0
    assert_all_gone(family)


def test_a_second_signal_ends_everything_at_once(sim: RunningSystem) -> None:
    ready = sim.wait_for("ready")
    family = sim.descendants()
    body = {"model": ready["model"], "prompt": "hello", "max_tokens": 8000, "ignore_eos": True}
    url = f"http://{ready['http']}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=WITHIN_S) as answer:
        lines = answer.iter_lines()  # kept: its end would be the client's leaving
        next(lines)
        since = len(sim.events)
        sim.process.send_signal(signal.SIGINT)
        sim.wait_for("step", name="stop", since=since)
        # It drains: the answer would go on for minutes.
        with pytest.raises(subprocess.TimeoutExpired):
            sim.process.wait(1)
        sim.process.send_signal(signal.SIGINT)
        assert sim.ended(10) == 0
    assert_all_gone(family)


@pytest.mark.parametrize(
    "engine",
    ["sim", pytest.param("vllm", marks=pytest.mark.vllm)],
)
def test_kill_9_of_the_supervisor_leaves_nothing(engine: str) -> None:
    system = RunningSystem("--engine", engine, "--prefill", "0", "--port", "0", "--grpc-port", "0")
    try:
        system.wait_for("ready")
        family = system.descendants()
        system.process.kill()
        system.process.wait()
        assert_all_gone(family)
    finally:
        system.stop()


def test_a_taken_port_is_one_clear_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = _up("--engine", "sim", "--port", str(port), "--grpc-port", "0")
    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "already in use" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--mode", "disaggregated", "--prefill", "0"), "--prefill"),
        pytest.param(("--kv-cache-gib", "1000"), "memory", marks=pytest.mark.vllm),
    ],
    ids=["no model", "no prefill worker", "out of memory"],
)
def test_what_cannot_start_says_why_in_one_line(flags: tuple[str, ...], named: str) -> None:
    ended = _up("--port", "0", "--grpc-port", "0", *flags)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("pdserve: error: ")
    assert named in line


def test_a_listener_beyond_loopback_needs_keys() -> None:
    ended = _up(*SIM, "--host", "0.0.0.0")
    assert ended.returncode == 1
    assert "keys" in ended.stderr


def test_modes_are_told_apart(sim: RunningSystem) -> None:
    ready = sim.wait_for("ready")
    body = {"model": ready["model"], "prompt": "hello", "max_tokens": 4, "temperature": 0}
    texts = set()
    for mode in ("colocated", "disaggregated"):
        answer = httpx.post(
            f"http://{ready['http']}/v1/completions",
            json=body,
            headers={"x-pdserve-mode": mode},
            timeout=WITHIN_S,
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdserve-mode"] == mode
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1


def _up(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "up", "--json", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_of_tests_that_is_killed_leaves_nothing() -> None:
    script = (
        "from tests.support.running_system import RunningSystem\n"
        f"system = RunningSystem(*{SIM!r})\n"
        "system.wait_for('ready')\n"
        "print(system.process.pid, *(child.pid for child in system.descendants()), flush=True)\n"
        "system.process.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        family = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        assert len(family) >= 4
        run.terminate()
    assert_all_gone(family)
