"""A whole system as `pdserve up` runs it, driven by the JSON lines that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import eventually

Event = dict[str, Any]


class RunningSystem:
    """Owns the supervisor's process; `stop` leaves nothing behind."""

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        # A run of tests that is killed stops nothing.
        bound = [sys.executable, "-m", "tests.support.bound", str(os.getpid())]
        command = [*bound, "cli.main", "up", "--json", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=None if env is None else dict(env),
        )
        self.events: list[Event] = []
        self.stderr: list[str] = []
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._on_event)),
            threading.Thread(target=self._read, args=(self.process.stderr, self._on_stderr)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, on_line: Callable[[str], None]) -> None:
        with stream:
            for line in stream:
                with self._news:
                    on_line(line)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _on_event(self, line: str) -> None:
        self.events.append(json.loads(line))

    def _on_stderr(self, line: str) -> None:
        self.stderr.append(line.rstrip())

    def wait_for(
        self, event: str, *, name: str | None = None, since: int = 0, timeout: float = 240
    ) -> Event:
        """The first such event from the `since`-th on; fails when the supervisor ends first."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for seen in self.events[since:]:
                    if seen["event"] == event and name in (None, seen.get("name")):
                        return seen
                left = deadline - time.monotonic()
                if self.process.poll() is not None and not self._readers[0].is_alive():
                    raise AssertionError(f"ended without {event!r}: {self.events} {self.stderr}")
                if left <= 0:
                    raise AssertionError(f"no {event!r} within {timeout} s: {self.events}")
                self._news.wait(min(left, 1.0))

    def descendants(self) -> list[psutil.Process]:
        """Every process below the supervisor, vLLM's engine processes included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        """The process of the coordinator, or of the worker of that name."""
        for process in psutil.Process(self.process.pid).children():
            line = process.cmdline()
            if name in line:
                return process
        raise AssertionError(f"no child {name!r}")

    def worker_address(self, name: str) -> str:
        """The gRPC address of a worker; it keeps it over a restart."""
        grpc = json.loads(self.child(name).environ()["PDSERVE_WORKER"])["grpc"]
        return f"{grpc['host']}:{grpc['port']}"

    def ended(self, within_s: float) -> int | None:
        """The exit code, where it ends of itself in time."""
        eventually(lambda: self.process.poll() is not None, within_s)
        return self.process.poll()

    def stop(self) -> int:
        """Asks it to end as Ctrl-C does, and returns its exit code; idempotent."""
        if self.process.poll() is None:
            family = self.descendants()
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            assert_all_gone(family)
        for reader in self._readers:
            reader.join()
        return self.process.wait()


def assert_all_gone(processes: list[psutil.Process], within_s: float = 10.0) -> None:
    """Fails when one of the processes is still there after a while; then ends it."""
    left = processes

    def all_gone() -> bool:
        nonlocal left
        _, left = psutil.wait_procs(left, timeout=0)
        return not left

    eventually(all_gone, within_s)
    names = [process.name() for process in left if process.is_running()]
    for process in left:
        process.kill()
    assert not names, f"left behind: {names}"


def sample(metrics_text: str, name: str, labels: Mapping[str, str] | None = None) -> float:
    """The sum of a metric's samples that carry the labels; 0 where there is none."""
    wanted = (labels or {}).items()
    return sum(
        each.value
        for family in text_string_to_metric_families(metrics_text)
        for each in family.samples
        if each.name == name and wanted <= each.labels.items()
    )


def log_text(event: Event) -> str:
    """Everything that the processes of a system logged, for a failing test's message."""
    return "\n".join(path.read_text() for path in Path(event["log_dir"]).glob("*.log"))
