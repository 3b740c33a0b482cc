"""Two mends of how vLLM 0.32 and NIXL 1.5.1 use a machine's cores; each checks that it took.

Both apply while a NIXL connector worker is made, in the process that computes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

PROGRESS_DELAY_US = 100
"""Pause of NIXL's progress thread between polls: the idle cost of a worker against latency."""


@contextlib.contextmanager
def cores_kept() -> Iterator[None]:
    """Keeps the calling thread on the cores that it was given.

    vLLM's NIXL worker (`nixl/base_worker.py`) moves the thread that makes it, which is the one
    that computes, to the last core of the NUMA node on CPU machines.
    """
    given = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, given)


@contextlib.contextmanager
def progress_thread_paced(bindings: Any) -> Iterator[None]:
    """Makes NIXL agents that are made meanwhile pause between polls.

    NIXL's Python API (`_api.py`, `nixl_agent.__init__`) hard-codes `pthrDelay = 0`, with which
    the progress thread takes a whole core, busy or not. `bindings` is its `_bindings`
    module. Raises RuntimeError if no agent was made through the way that is mended.
    """
    original = bindings.nixlAgent
    made = []

    def paced(name: str, config: Any) -> Any:
        if config.pthrDelay != 0:
            raise RuntimeError("NIXL no longer hard-codes pthrDelay = 0; remove this mend")
        config.pthrDelay = PROGRESS_DELAY_US
        made.append(name)
        return original(name, config)

    bindings.nixlAgent = paced
    try:
        yield
    finally:
        bindings.nixlAgent = original
    if not made:
        raise RuntimeError("NIXL makes its agents in another way; its progress thread would spin")
