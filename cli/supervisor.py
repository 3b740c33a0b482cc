"""Starts child processes, watches them, restarts those that die, and stops them. Prints nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from cli.child import Child, ChildFailedError, ChildSpec, Ending, Message


class Observer(Protocol):
    """Who is told what happens to the children."""

    def message(self, name: str, message: Message) -> None:
        """A child reported something that is not an end."""

    def line(self, name: str, line: str) -> None:
        """A child logged a line."""

    def died(self, ending: Ending, restart_in_s: float) -> None:
        """A child ended by itself and is started again in `restart_in_s`."""

    def restarted(self, name: str) -> None:
        """A child that died is ready again."""

    def killed(self, name: str, after_s: float) -> None:
        """A child did not end when it was asked to, and had to be killed."""


@dataclass(frozen=True)
class RestartLimits:
    """At most `count` restarts of a child within `window_s`, each later than the one before."""

    count: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0


@dataclass
class RestartBudget:
    """The restarts of one child, on a clock that the caller reads."""

    limits: RestartLimits
    _times: deque[float] = field(default_factory=deque)

    def take(self, now: float) -> float | None:
        """The delay before the next restart, or None when none is left."""
        while self._times and now - self._times[0] >= self.limits.window_s:
            self._times.popleft()
        if len(self._times) >= self.limits.count:
            return None
        delay = self.limits.first_delay_s * 2.0 ** len(self._times)
        self._times.append(now)
        return min(delay, self.limits.longest_delay_s)


class GaveUpError(Exception):
    """A child died more often than its restarts allow."""

    def __init__(self, ending: Ending, limits: RestartLimits) -> None:
        super().__init__(
            f"{ending.name} {ending.how}, "
            f"after {limits.count} restarts within {limits.window_s / 60:.0f} minutes"
        )
        self.ending = ending


class Supervisor:
    """A set of named children. From `start` on, a child that dies is started again."""

    def __init__(
        self,
        observer: Observer,
        log_dir: Path,
        *,
        limits: RestartLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        self._log_dir = log_dir
        self._limits = limits or RestartLimits()
        self._clock = clock
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, TextIO] = {}
        self._gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    async def run(self, spec: ChildSpec) -> Message:
        """Starts a child that has one task, waits for its end, and returns its "ready" message.

        Raises ChildFailedError when it fails.
        """
        child = await self._spawn(spec)
        message = await child.ready()
        ending = await child.wait()
        if ending.returncode != 0:
            raise ChildFailedError(ending)
        return message

    async def start(self, spec: ChildSpec) -> Message:
        """Starts a child and returns its "ready" message; from then on it is kept running.

        Raises ChildFailedError when it ends before it is ready.
        """
        child = await self._spawn(spec)
        message = await child.ready()
        keeper = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")
        keeper.add_done_callback(self._kept)
        self._keepers[spec.name] = keeper
        return message

    async def gave_up(self) -> None:
        """Waits until a child is beyond its restarts, then raises GaveUpError."""
        await asyncio.shield(self._gave_up)

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Asks children (all of them by default) to end, waits, and kills those that do not."""
        chosen = (
            list(self._children) if names is None else [n for n in names if n in self._children]
        )
        keepers = [self._keepers.pop(name) for name in chosen if name in self._keepers]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(self._stop(self._children[name]) for name in chosen))

    def kill(self) -> None:
        """Kills every child and whatever they started; `stop` then returns at once."""
        for keeper in self._keepers.values():
            keeper.cancel()
        for child in self._children.values():
            child.kill()

    def close(self) -> None:
        """Closes the logs."""
        for log in self._logs.values():
            log.close()

    async def _spawn(self, spec: ChildSpec) -> Child:
        name = spec.name
        if name not in self._logs:
            self._logs[name] = self.log_path(name).open("a", encoding="utf-8", buffering=1)
        log = self._logs[name]

        def on_line(line: str) -> None:
            log.write(line + "\n")
            self._observer.line(name, line)

        child = await Child.spawn(
            spec, lambda message: self._observer.message(name, message), on_line
        )
        self._children[name] = child
        return child

    async def _keep(self, child: Child) -> None:
        budget = RestartBudget(self._limits)
        while True:
            ending = await child.wait()
            delay = budget.take(self._clock())
            if delay is None:
                raise GaveUpError(ending, self._limits)
            self._observer.died(ending, delay)
            await asyncio.sleep(delay)
            child = await self._spawn(child.spec)
            try:
                await child.ready()
            except ChildFailedError:
                continue  # its end is read where every end is
            self._observer.restarted(child.spec.name)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled() or self._gave_up.done():
            return
        if error := keeper.exception():
            self._gave_up.set_exception(error)

    async def _stop(self, child: Child) -> None:
        child.terminate()
        try:
            async with asyncio.timeout(child.spec.stop_s):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()
            self._observer.killed(child.spec.name, child.spec.stop_s)
