"""Tests on an event loop whose time passes at once; see `measure/simulation/virtual_time.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from measure.simulation.virtual_time import VirtualTimeLoop, run, settle

__all__ = ["VirtualTimeLoop", "on_virtual_time", "run", "settle"]

P = ParamSpec("P")


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test
