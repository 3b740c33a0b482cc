"""What the coordinator's index of prefix caches costs: `python -m measure.prefix_index`.

The worst case for memory: no block of any worker is another's; then 1,000 blocks that all share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import psutil

from coordinator.policy.prefix import PrefixIndex, PromptBlocks
from pdserve.cached_blocks import PART_BLOCKS, CacheChange, CachedBlocks
from pdserve.convert_worker import cache_change_from_proto, cache_change_to_proto
from pdserve.v1.worker_pb2 import WatchCacheResponse

WORKERS = 200
BLOCKS = 50_000
SHARED = 1_000
TOLD = 100_000
BLOCK_SIZE = 32


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def _seconds(work: Callable[[], object], times: int = 1) -> float:
    """CPU time of one call of `times`."""
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) / times


def _index() -> None:
    random = Random(1)
    index = PrefixIndex()
    caches = [index.join(BLOCK_SIZE, BLOCKS * BLOCK_SIZE) for _ in range(WORKERS)]
    before, applied = _resident(), 0.0
    for cache in caches:
        names = [random.getrandbits(64) for _ in range(BLOCKS)]
        for start in range(0, BLOCKS, PART_BLOCKS):
            part = names[start : start + PART_BLOCKS]
            begun = time.process_time()
            cache.apply(part, ())
            applied += time.process_time() - begun
    total = WORKERS * BLOCKS
    prompt = PromptBlocks(tuple(range(SHARED * BLOCK_SIZE + 1)), "")
    names = prompt.chain(BLOCK_SIZE)
    unknown = _seconds(lambda: index.cached_tokens(prompt, caches), 500)
    memory = (_resident() - before) / total
    for cache in caches:
        cache.apply(names, ())
    known = _seconds(lambda: index.cached_tokens(prompt, caches), 100)
    tokens = tuple(range(SHARED * BLOCK_SIZE))
    hashed = _seconds(lambda: PromptBlocks(tokens, "").chain(BLOCK_SIZE), 20)
    print(f"{WORKERS} workers x {BLOCKS:,} blocks, none shared")
    print(f"  memory               {memory:8.0f} bytes a block")
    print(f"  taking a block in    {applied / total * 1e6:8.3f} us")
    print(f"  a prompt of nobody's {unknown * 1e6:8.0f} us")
    print(f"  {SHARED:,} blocks of all   {known * 1e6:8.0f} us")
    print(f"  hashing {SHARED:,} blocks {hashed * 1e6:8.0f} us")
    print(f"  a worker that leaves {_seconds(caches[0].leave) * 1e3:8.1f} ms")


def _wire() -> None:
    random = Random(2)
    before = _resident()
    blocks = CachedBlocks()
    blocks.add([random.getrandbits(64) for _ in range(TOLD)])
    print(f"a worker that tells {TOLD:,} blocks")
    print(f"  memory               {(_resident() - before) / TOLD:8.0f} bytes a block")
    names = [random.getrandbits(64) for _ in range(PART_BLOCKS)]
    change = CacheChange(False, names, ())
    message = cache_change_to_proto(change, 1).SerializeToString()
    print(f"  on the wire          {len(message) / PART_BLOCKS:8.2f} bytes a block")
    packed = _seconds(lambda: cache_change_to_proto(change, 1).SerializeToString(), 50)
    print(f"  to send a block      {packed / PART_BLOCKS * 1e6:8.3f} us")

    def read() -> list[int]:
        return list(cache_change_from_proto(WatchCacheResponse.FromString(message)).added)

    print(f"  to read a block      {_seconds(read, 50) / PART_BLOCKS * 1e6:8.3f} us")


if __name__ == "__main__":
    _wire()
    _index()
