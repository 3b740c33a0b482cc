"""Starts the processes of a run, each on its core, and ends them however the run ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

import psutil

START_S = 60.0
_STOP_S = 10.0
_DRAIN_S = 0.5
_POLL_S = 0.02
_SHOWN_BYTES = 2_000


class BenchError(Exception):
    """Why there is no result, in words for the one who started the run."""


class Child:
    """A process that runs until it is stopped; its standard error goes to a file."""

    def __init__(self, name: str, process: Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    @property
    def pids(self) -> tuple[int, ...]:
        """Its own and those of all that it started."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        return (self._process.pid, *(child.pid for child in family))

    async def event(self, name: str, within_s: float = START_S) -> dict[str, Any]:
        """The next JSON line of its output with that "event".

        Raises BenchError when it ends before, or does not come in time.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                async for line in self._process.stdout:
                    if line.startswith(b'{"event"'):
                        message: dict[str, Any] = json.loads(line)
                        if message["event"] == name:
                            return message
        except TimeoutError:
            raise self.error(f"was not {name} within {within_s:.0f} s") from None
        raise self.error("ended")

    async def output(self, timeout_s: float) -> bytes:
        """All of its output, once it has ended. Raises BenchError unless it ended well."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                output = await self._process.stdout.read()
                code = await self._process.wait()
        except TimeoutError:
            raise self.error(f"did not end within {timeout_s:.0f} s") from None
        if code:
            raise self.error(f"ended with code {code}")
        return output

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def error(self, what: str) -> BenchError:
        """With the end of what it wrote to its standard error."""
        self._errors.seek(0)
        told = self._errors.read()[-_SHOWN_BYTES:].decode(errors="replace").strip()
        return BenchError(f"{self.name} {what}\n{told}".strip())

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole session after ten seconds."""
        if not self.ended:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._exit()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._exit()
        if self._process.stdout is not None:
            # What nobody read would keep the pipe open.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await self._process.stdout.read()

    async def _exit(self) -> None:
        # Not by `wait`: that also waits for the end of the output, which nobody may read.
        while not self.ended:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def child(
    name: str, core: int | None, program: Sequence[str], *, is_read: bool = True
) -> AsyncIterator[Child]:
    """Runs a program on one core, or on all, while the context lasts.

    Its standard output is for `event` or `output` to read; unless `is_read`, it joins the
    standard error.
    """
    launcher = (
        sys.executable,
        "-m",
        "measure.pinned",
        "all" if core is None else str(core),
        str(os.getpid()),
    )
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *launcher,
            *program,
            stdin=DEVNULL,
            stdout=PIPE if is_read else errors,
            stderr=errors,
            process_group=0,  # a Ctrl-C reaches this process alone, which ends them
        )
        running = Child(name, process, errors)
        try:
            yield running
        finally:
            await running.stop()


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, for programs that cannot pick one themselves."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
