"""The threads in which long texts become tokens, and many tokens text: few, whoever asks.

What a body has room for takes seconds, in which the tokenizer leaves the interpreter to others,
but no core. Whoever comes later waits for a turn, and whoever leaves before it costs nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THREADS = max(1, (os.cpu_count() or 1) // 2)
_POOL = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")

THREAD_CHARS = 8 * 1024
THREAD_TOKENS = 8 * 1024
"""So many, and more, belong in a thread: they would hold up every token stream."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, partial(work, *args, **kwargs))


async def looked_up(look_up: Callable[[tuple[int, ...]], T], token_ids: tuple[int, ...]) -> T:
    """What `look_up` says of the tokens; of few at once."""
    if len(token_ids) < THREAD_TOKENS:
        return look_up(token_ids)
    return await in_thread(look_up, token_ids)
