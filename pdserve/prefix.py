"""What names a block of a prompt: one number for its tokens, all before them, the salt and the
LoRA adapter. Pure.

Coordinator and workers compute the same names, each from token ids: what an engine calls its
blocks stays inside the worker.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4


def root(cache_salt: str, lora: str) -> int:
    """The name before the first block: prompts with different salts or adapters share none."""
    seed = xxh3_64_intdigest(lora.encode()) if lora else 0
    return xxh3_64_intdigest(cache_salt.encode(), seed=seed)


def extend(parent: int, token_ids: Sequence[int], block_size: int) -> list[int]:
    """The names of the full blocks in `token_ids`, the first of which comes after `parent`."""
    names: list[int] = []
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    block_bytes = block_size * _TOKEN_BYTES
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = xxh3_64_intdigest(packed[start : start + block_bytes], seed=parent)
        names.append(parent)
    return names


def chain(token_ids: Sequence[int], cache_salt: str, block_size: int, lora: str = "") -> list[int]:
    """The names of a prompt's full blocks of `block_size` tokens."""
    return extend(root(cache_salt, lora), token_ids, block_size)
