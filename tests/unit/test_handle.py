"""What ties a KV handle to its prompt and to the fleet that made it."""

from __future__ import annotations

from blake3 import blake3

from pdserve.handle import digest


def test_the_digest_is_over_little_endian_ids_then_the_salt() -> None:
    assert digest((1, 256), "s") == blake3(b"\1\0\0\0\0\1\0\0s").digest()
