"""What ties a KV handle to its prompt and to the fleet that made it. Pure."""

from __future__ import annotations

import hmac
import struct
from dataclasses import replace

import msgspec
from blake3 import blake3

from pdserve.types import KvHandle

_SEAL_CONTEXT = "pdserve 2026-11-29 seal of KV handles"


def digest(token_ids: tuple[int, ...], cache_salt: str, lora: str) -> bytes:
    """BLAKE3 (32 bytes) over the ids, little-endian 32 bit each, then the salt in UTF-8 after its
    length, likewise, and the adapter's name in UTF-8."""
    salt = cache_salt.encode()
    ids = struct.pack(f"<{len(token_ids) + 1}I", *token_ids, len(salt))
    return blake3(ids + salt + lora.encode()).digest()


def seal_key(fleet_key: str | None) -> bytes:
    """The key (32 bytes) of this fleet's seals.

    Without a fleet key it is the same everywhere: seals then tell damage, but no forgery.
    """
    return blake3((fleet_key or "").encode(), derive_key_context=_SEAL_CONTEXT).digest()


def sealed(handle: KvHandle, key: bytes) -> KvHandle:
    """The handle with its seal: what is changed from then on shows."""
    return replace(handle, seal=_seal(handle, key))


def is_intact(handle: KvHandle, key: bytes) -> bool:
    """Whether the handle is, in every field, as it was sealed with this key."""
    return hmac.compare_digest(handle.seal, _seal(handle, key))


def _seal(handle: KvHandle, key: bytes) -> bytes:
    # MessagePack of all other fields by name: equal handles give equal bytes.
    return blake3(msgspec.msgpack.encode(replace(handle, seal=b"")), key=key).digest()
