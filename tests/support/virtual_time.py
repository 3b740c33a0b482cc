"""An event loop on which time passes only when nothing else can happen, and then at once."""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar
from unittest import mock

P = ParamSpec("P")
T = TypeVar("T")


_THREADS_S = 5.0
"""Real seconds that a thread may take to be heard of, where all else waits."""

_LONGEST_S = 3600.0
"""Virtual seconds after which a test is taken to wait for ever, with a timer that comes back."""


class _Jump(selectors.DefaultSelector):
    """Where the loop would sleep, moves `now` on instead."""

    def __init__(self) -> None:
        super().__init__()
        # Ahead of the real clock, which some code may have got hold of before.
        self.now = time.monotonic() + 1e6
        self._end = self.now + _LONGEST_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            if events := super().select(_THREADS_S):
                return events
            raise RuntimeError("everything waits, and nothing is left that could happen")
        self.now += timeout
        if self.now > self._end:
            self._end += _LONGEST_S
            raise RuntimeError("an hour has passed, and the test has not ended")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def stand_still(self, seconds: float) -> None:
        """Lets time pass in which the loop does nothing, as in a long call that blocks."""
        self._jump.now += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a loop of its own, whose time `time.monotonic` tells too.

    Fails for an exception that nobody heard of, such as a forgotten task's.
    """
    unheard: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        with mock.patch("time.monotonic", loop.time):
            result = runner.run(main)
    assert not unheard, unheard
    return result


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


async def settle() -> None:
    """Returns when everything that can happen at this moment has happened."""
    await asyncio.sleep(1e-6)
