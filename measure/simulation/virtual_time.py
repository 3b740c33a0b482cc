"""An event loop on which time passes only when nothing else can happen, and then at once.

PyPI's `looptime` does the same for tests; it goes round the loop 42 times before each leap, and
cannot tell that nothing is left to wait for.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

START = 1e6
"""Where time begins: the same in each run, and so is every rounding of a moment."""

_THREADS_S = 5.0
"""Real seconds that a thread may take to be heard of, where all else waits."""


class _Jump(selectors.DefaultSelector):
    """Where the loop would sleep, moves `now` on instead, to `end` at most."""

    def __init__(self, longest_s: float) -> None:
        super().__init__()
        self.now = START
        self._longest_s = longest_s
        self._end = START + longest_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []  # sockets and threads are asked when all else is done
        if events := super().select(0):
            return events
        if timeout is None:
            if events := super().select(_THREADS_S):
                return events
            raise RuntimeError("everything waits, and nothing is left that could happen")
        self.now += timeout
        if self.now > self._end:
            self._end += self._longest_s
            raise RuntimeError(f"{self._longest_s:g} s have passed, and the run has not ended")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, longest_s: float) -> None:
        self._jump = _Jump(longest_s)
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def stand_still(self, seconds: float) -> None:
        """Lets time pass in which the loop does nothing, as in a long call that blocks."""
        self._jump.now += seconds


def run(main: Coroutine[Any, Any, T], longest_s: float = 3600.0) -> T:
    """Runs `main` on a loop of its own, whose time `time.monotonic` tells too.

    Raises RuntimeError after `longest_s` virtual seconds, for it then may wait for ever with a
    timer that comes back; and AssertionError for an exception that nobody heard of, such as a
    forgotten task's.
    """
    unheard: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(longest_s)) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        with _told_by(loop):
            result = runner.run(main)
    if unheard:
        raise AssertionError(unheard)
    return result


@contextmanager
def _told_by(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Has `time.monotonic` tell the loop's time."""
    real = time.monotonic
    time.monotonic = loop.time
    try:
        yield
    finally:
        time.monotonic = real


async def settle() -> None:
    """Returns when everything that can happen at this moment has happened."""
    await asyncio.sleep(1e-6)
