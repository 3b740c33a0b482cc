"""A KV cache without an engine, whose blocks can be told apart, and who gets which of them."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch

from measure.kv_transfer.jobs import BLOCK_SIZE, Model, num_blocks
from pdserve.engine.kv.blocks import BlockStore, CacheShape, block_rows, block_store

Tags = np.ndarray[tuple[int, int], np.dtype[np.int64]]

SPARE = 1.25
"""Blocks of a cache, over those of the longest prompt."""

_CHURN = 200
_LIVE = 8


class Cache:
    """Layers of blocks in main memory. Every block begins and ends with a number of its own."""

    def __init__(self, model: Model, num_tokens: int, side: int) -> None:
        self.num_blocks = int(num_blocks(num_tokens) * SPARE)
        self._side = side
        shape = (model.num_layers, self.num_blocks, model.bytes_per_block)
        self.tensor = torch.full(shape, side, dtype=torch.uint8)
        self._words = self.tensor.numpy().view(np.int64)
        self.mark(list(range(self.num_blocks)))
        self.shape = CacheShape(
            BLOCK_SIZE, model.num_layers, model.bytes_per_block, "LBHNC", "bfloat16"
        )

    def store(self) -> BlockStore:
        layers = {str(number): layer for number, layer in enumerate(self.tensor)}
        return block_store(block_rows(layers, self.num_blocks))

    def mark(self, blocks: list[int]) -> None:
        """Makes them this cache's own again."""
        tags = self._tags(self._side, blocks)
        for word in (0, -1):
            self._words[:, blocks, word] = tags

    def holds(self, blocks: list[int], side: int, theirs: list[int]) -> bool:
        """Whether these blocks are now those of the other side's cache, in this order."""
        tags = self._tags(side, theirs)
        return all(np.array_equal(self._words[:, blocks, word], tags) for word in (0, -1))

    def _tags(self, side: int, blocks: list[int]) -> Tags:
        layers = np.arange(self._words.shape[0], dtype=np.int64)[:, None]
        return (np.int64(side) << 48) + (layers << 32) + np.asarray(blocks, np.int64)[None, :]


def used_blocks(capacity: int, count: int, seed: int) -> list[int]:
    """Blocks that a prompt gets from a cache that many prompts have used, as vLLM gives them.

    vLLM's pool takes free blocks from the head of a queue, and puts those of a request that has
    ended at its tail, the last block first.
    """
    chance = random.Random(seed)
    free = deque(range(capacity))
    live: list[list[int]] = []
    for _ in range(_CHURN):
        wanted = chance.randint(1, max(1, capacity // _LIVE))
        if wanted <= len(free):
            live.append([free.popleft() for _ in range(wanted)])
        if len(live) == _LIVE or wanted > len(free):
            free.extend(reversed(live.pop(chance.randrange(len(live)))))
    while live:
        free.extend(reversed(live.pop(chance.randrange(len(live)))))
    return [free.popleft() for _ in range(count)]
