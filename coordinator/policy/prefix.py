"""What each worker's prefix cache is believed to hold: an approximate index of block hashes."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 32


def chain(token_ids: tuple[int, ...], cache_salt: str) -> tuple[int, ...]:
    """A hash for each full block that stands for the prompt up to the block's end.

    Blocks of BLOCK_TOKENS tokens; prompts with different salts share none.
    """
    return tuple(_chain(token_ids, cache_salt))


def _chain(token_ids: tuple[int, ...], cache_salt: str) -> Iterator[int]:
    parent = xxh3_64_intdigest(cache_salt.encode())
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    block_bytes = BLOCK_TOKENS * 4
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = xxh3_64_intdigest(packed[start : start + block_bytes], seed=parent)
        yield parent


class PrefixIndex:
    """The most recently used blocks of one worker, at most `max_blocks` of them."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, hashes: tuple[int, ...]) -> None:
        # The end of a prompt is of no use without its beginning, so it is forgotten first.
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def cached_tokens(self, hashes: tuple[int, ...]) -> int:
        """How many leading tokens of the prompt behind `hashes` are believed to be cached."""
        blocks = 0
        for block in hashes:
            if block not in self._blocks:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS
