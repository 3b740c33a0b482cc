"""What ties a KV handle to its prompt and to the fleet that made it. Pure."""

from __future__ import annotations

import struct

from blake3 import blake3


def digest(token_ids: tuple[int, ...], cache_salt: str) -> bytes:
    """BLAKE3 (32 bytes) over the ids, little-endian 32 bit each, then the salt in UTF-8."""
    return blake3(struct.pack(f"<{len(token_ids)}I", *token_ids) + cache_salt.encode()).digest()
