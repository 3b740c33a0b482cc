"""One run of a child process: how it is started, what it says, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A JSON object with an "event", one line of a child's standard output."""

_STDOUT, _STDERR = 1, 2
_KEPT_LINES = 200
_LINE_LIMIT = 2**20
_FLUSH_S = 2.0
_ERROR_MARK = "pdserve: error: "
_LOGGED_ERROR = re.compile(r"\[(error|critical) *\]|\b(ERROR|CRITICAL|FATAL|Fatal)\b")
_SHOWN_LINES = 5
_SHOWN_WIDTH = 300


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
        """The lines that say why, best first: its error line, its last exception, logged errors.

        None of these: the last lines of any kind, unless a signal says enough.
        """
        for line in reversed(self.tail):
            if line.startswith(_ERROR_MARK):
                return (line.removeprefix(_ERROR_MARK),)
        logged = tuple(line for line in self.tail if _LOGGED_ERROR.search(line))
        lines = _last_exception(self.tail) or logged
        if not lines and self.returncode >= 0:
            lines = self.tail
        return tuple(_shorten(line) for line in lines[-_SHOWN_LINES:])


class ChildFailedError(Exception):
    """A child ended when it should not have."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"{ending.name} {ending.how}")
        self.ending = ending


class Child(asyncio.SubprocessProtocol):
    """A running child, in a process group of its own: a Ctrl-C in the terminal reaches only its
    parent. No session of its own: Linux shares out its time by sessions ("autogroups"), `nice`
    does nothing between them, and 6.18 gave one of two busy ones on a core nothing for minutes.

    `on_message` gets each JSON line of its standard output, `on_line` every other line
    and all of its standard error.
    """

    # asyncio.subprocess.Process is not used: its wait() waits for the pipes, too, and those
    # stay open for as long as anything that the child started lives.

    def __init__(
        self,
        spec: ChildSpec,
        on_message: Callable[[Message], None],
        on_line: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self._loop = loop
        self._on_message = on_message
        self._on_line = on_line
        self._ready: asyncio.Future[Message] = loop.create_future()
        self._end: asyncio.Future[Ending] = loop.create_future()
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._buffers = {_STDOUT: bytearray(), _STDERR: bytearray()}

    @classmethod
    async def spawn(
        cls,
        spec: ChildSpec,
        on_message: Callable[[Message], None],
        on_line: Callable[[str], None],
    ) -> Child:
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(spec, on_message, on_line),
            *spec.argv,
            env=spec.env,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        return child

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
            self._transport.terminate()

    def kill(self) -> None:
        """Ends it and everything that it started, at once."""
        if self._end.done():
            return  # its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        buffer = self._buffers[fd]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        self._buffers[fd] = rest[-_LINE_LIMIT:]
        for line in lines:
            self._line(fd, line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._line(fd, self._buffers[fd])

    def process_exited(self) -> None:
        # What it started must not outlive it: it would hold its ports and its pipes open.
        self.kill()
        self._loop.call_later(_FLUSH_S, self._ended)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()

    def _ended(self) -> None:
        if not self._end.done():
            returncode = self._transport.get_returncode()
            assert returncode is not None, "the process has exited"
            self._transport.close()
            self._end.set_result(Ending(self.spec.name, returncode, tuple(self._tail)))

    def _line(self, fd: int, raw: bytes | bytearray) -> None:
        line = raw.decode(errors="replace").rstrip()
        message = _parse(line) if fd == _STDOUT else None
        if message is not None:
            if message["event"] == "ready" and not self._ready.done():
                self._ready.set_result(message)
            self._on_message(message)
        elif line:
            self._tail.append(line)
            self._on_line(line)


def _last_exception(lines: tuple[str, ...]) -> tuple[str, ...]:
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback ")]
    after = lines[starts[-1] + 1 :] if starts else ()
    return tuple(line for line in after if line[:1].strip())[:1]


def _shorten(line: str) -> str:
    return line if len(line) <= _SHOWN_WIDTH else f"{line[:_SHOWN_WIDTH]}..."


def _parse(line: str) -> Message | None:
    if not line.startswith("{"):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message.get("event"), str) else None
