"""One run of a child process: how it is started, what it says, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A JSON object with an "event", one line of a child's standard output."""

_KEPT_LINES = 200
_LINE_LIMIT = 2**20
_FLUSH_S = 2.0
_ERROR_MARK = "pdserve: error: "
_SHOWN_LINES = 5


@dataclass(frozen=True)
class ChildSpec:
    """What to start: `env` is the whole environment; SIGTERM may take `stop_s`, then SIGKILL."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_s: float


@dataclass(frozen=True)
class Ending:
    """How a child ended; `tail` is the end of its log, oldest line first."""

    name: str
    returncode: int
    tail: tuple[str, ...]

    @property
    def how(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        try:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        except ValueError:
            return f"was killed by signal {-self.returncode}"

    @property
    def reason(self) -> tuple[str, ...]:
        """The lines that say why: its error line, else its last exception, else its last lines."""
        for line in reversed(self.tail):
            if line.startswith(_ERROR_MARK):
                return (line.removeprefix(_ERROR_MARK),)
        return _last_exception(self.tail) or self.tail[-_SHOWN_LINES:]


class ChildFailedError(Exception):
    """A child ended when it should not have."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"{ending.name} {ending.how}")
        self.ending = ending


class Child:
    """A running child, in a session of its own: a Ctrl-C in the terminal reaches only its parent.

    `on_message` gets each JSON line of its standard output, `on_line` every other line
    and all of its standard error.
    """

    def __init__(
        self,
        spec: ChildSpec,
        process: Process,
        on_message: Callable[[Message], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self._process = process
        self._on_message = on_message
        self._on_line = on_line
        self._ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._end = asyncio.create_task(self._run(), name=f"child {spec.name}")

    @classmethod
    async def spawn(
        cls,
        spec: ChildSpec,
        on_message: Callable[[Message], None],
        on_line: Callable[[str], None],
    ) -> Child:
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            env=spec.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LINE_LIMIT,
            start_new_session=True,
        )
        return cls(spec, process, on_message, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Message:
        """Its "ready" message. Raises ChildFailedError when it ends without one."""
        either: list[asyncio.Future[Any]] = [self._ready, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        raise ChildFailedError(self._end.result())

    async def wait(self) -> Ending:
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends it and everything that it started, at once."""
        if self._end.done():
            return  # its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _run(self) -> Ending:
        pumps = asyncio.gather(self._pump_stdout(), self._pump_stderr())
        returncode = await self._process.wait()
        # What it started must not outlive it: it would hold its ports and its pipes open.
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await pumps
        return Ending(self.spec.name, returncode, tuple(self._tail))

    async def _pump_stdout(self) -> None:
        async for line in _lines(self._process.stdout):
            message = _parse(line)
            if message is None:
                self._log(line)
                continue
            if message["event"] == "ready" and not self._ready.done():
                self._ready.set_result(message)
            self._on_message(message)

    async def _pump_stderr(self) -> None:
        async for line in _lines(self._process.stderr):
            self._log(line)

    def _log(self, line: str) -> None:
        self._tail.append(line)
        self._on_line(line)


def _last_exception(lines: tuple[str, ...]) -> tuple[str, ...]:
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback ")]
    after = lines[starts[-1] + 1 :] if starts else ()
    return tuple(line for line in after if line[:1].strip())[:1]


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    assert stream is not None, "every child is started with pipes"
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line beyond the limit; the stream has dropped it
            continue
        if not line:
            return
        if text := line.decode(errors="replace").rstrip():
            yield text


def _parse(line: str) -> Message | None:
    if not line.startswith("{"):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message.get("event"), str) else None
