"""Whether a KV handle may be decoded from. Pure: time is passed in.

A handle that is stale, foreign, altered or used before would yield wrong text that looks
right; so every field is compared and nothing is believed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields

from pdserve.engine.base import EngineInfo
from pdserve.errors import DecodeError, ErrorReason
from pdserve.handle import digest, is_intact
from pdserve.types import (
    EngineRequest,
    Fingerprint,
    KvDescriptor,
    KvHandle,
)

MAX_REMEMBERED = 65_536


class HandleVerifier:
    """Checks handles for one engine and remembers which were used.

    A used handle is remembered until its lease ends, after which it is refused as expired;
    of more than `max_remembered` the ones used first are forgotten.
    """

    def __init__(
        self, engine: EngineInfo, key: bytes, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        """`key` is that of the fleet's seals."""
        self._engine = engine
        self._key = key
        self._max_remembered = max_remembered
        self._used: OrderedDict[str, float] = OrderedDict()

    @property
    def remembered(self) -> int:
        return len(self._used)

    def use(self, handle: KvHandle, request: EngineRequest, now: float) -> KvDescriptor:
        """Marks the handle used and returns where its blocks are fetched.

        `now` is in seconds since the Unix epoch. Raises DecodeError with a KV_ reason that
        names the difference.
        """
        if not is_intact(handle, self._key):
            raise DecodeError(
                ErrorReason.KV_ALTERED,
                "the KV handle is not as it was sealed, or its fleet has another key",
            )
        self._check_origin(handle)
        _check_prompt(handle, request)
        expiry = handle.lease_expiry_ns / 1e9
        if expiry <= now:
            raise DecodeError(
                ErrorReason.KV_EXPIRED, f"the KV lease ended {now - expiry:.3f} s ago"
            )
        self._forget(now)
        if handle.handle_id in self._used:
            raise DecodeError(ErrorReason.KV_REUSED, "the KV handle was used before")
        self._used[handle.handle_id] = expiry
        return handle.descriptor

    def _check_origin(self, handle: KvHandle) -> None:
        difference = _difference(handle.fingerprint, self._engine.fingerprint)
        if difference is not None:
            raise _incompatible(difference)
        transport = handle.descriptor.transport
        if transport not in self._engine.transports:
            raise _incompatible(f"the KV transport {transport} cannot be used here")

    def _forget(self, now: float) -> None:
        # Leases are of similar length, so the order of use is nearly that of expiry.
        while self._used:
            handle_id, expiry = next(iter(self._used.items()))
            if expiry > now and len(self._used) < self._max_remembered:
                return
            del self._used[handle_id]


def _check_prompt(handle: KvHandle, request: EngineRequest) -> None:
    num_tokens = len(request.token_ids)
    if handle.num_tokens != num_tokens:
        raise DecodeError(
            ErrorReason.KV_DIGEST_MISMATCH,
            f"the KV handle covers {handle.num_tokens} tokens, the prompt has {num_tokens}",
        )
    if handle.digest != digest(request.token_ids, request.cache_salt, request.lora):
        raise DecodeError(
            ErrorReason.KV_DIGEST_MISMATCH,
            "the KV handle's digest is not that of the prompt, its cache salt and its adapter",
        )


def _difference(theirs: Fingerprint, ours: Fingerprint) -> str | None:
    if theirs == ours:
        return None
    pairs = ((f.name, getattr(theirs, f.name), getattr(ours, f.name)) for f in fields(Fingerprint))
    parts = (f"{name} {their!r}, not {our!r}" for name, their, our in pairs if their != our)
    return f"the KV was made with {'; '.join(parts)}"


def _incompatible(message: str) -> DecodeError:
    return DecodeError(ErrorReason.KV_INCOMPATIBLE, message)
