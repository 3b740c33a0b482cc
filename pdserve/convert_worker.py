"""Copies what a worker says of itself: as `pdserve.convert`, of which it is a part."""

from __future__ import annotations

import math

from pdserve.cached_blocks import CacheChange
from pdserve.convert import duration, fingerprint_from_proto, fingerprint_to_proto, seconds
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import EngineWork, Load, Role, WorkerInfo
from pdserve.v1 import worker_pb2

_ROLE_TO_PROTO = {
    Role.PREFILL: worker_pb2.ROLE_PREFILL,
    Role.DECODE: worker_pb2.ROLE_DECODE,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}


def worker_info_to_proto(info: WorkerInfo) -> worker_pb2.GetWorkerInfoResponse:
    return worker_pb2.GetWorkerInfoResponse(
        worker_id=info.worker_id,
        epoch=info.epoch,
        roles=sorted(_ROLE_TO_PROTO[role] for role in info.roles),
        model=info.model,
        fingerprint=fingerprint_to_proto(info.fingerprint),
        engine=info.engine,
        context_length=info.context_length,
        kv_capacity_tokens=info.kv_capacity_tokens,
        transports=info.transports,
        weights=info.weights,
        version=info.version,
        chunk_tokens=info.chunk_tokens,
        max_sequences=info.max_sequences,
        tells_cache=info.tells_cache,
        adapters=info.adapters,
    )


def worker_info_from_proto(message: worker_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """Raises DecodeError for an engine that reads nothing."""
    _require("chunk_tokens", message.chunk_tokens > 0, message.chunk_tokens)
    return WorkerInfo(
        worker_id=message.worker_id,
        epoch=message.epoch,
        roles=frozenset(
            _ROLE_FROM_PROTO[number] for number in message.roles if number in _ROLE_FROM_PROTO
        ),
        model=message.model,
        fingerprint=fingerprint_from_proto(message.fingerprint),
        engine=message.engine,
        context_length=message.context_length,
        kv_capacity_tokens=message.kv_capacity_tokens,
        transports=tuple(message.transports),
        weights=message.weights,
        version=message.version,
        chunk_tokens=message.chunk_tokens,
        max_sequences=message.max_sequences,
        tells_cache=message.tells_cache,
        adapters=tuple(message.adapters),
    )


def load_to_proto(load: Load) -> worker_pb2.WatchLoadResponse:
    return worker_pb2.WatchLoadResponse(
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        open_leases=load.open_leases,
        reserved_tokens=load.reserved_tokens,
        draining=load.draining,
        lease_tokens=load.lease_tokens,
        oldest_lease_age=duration(load.oldest_lease_s),
        work=work_to_proto(load.work),
    )


def load_from_proto(message: worker_pb2.WatchLoadResponse) -> Load:
    """Raises DecodeError for numbers with which nothing can be reckoned."""
    _require("kv_usage", 0 <= message.kv_usage <= 1, message.kv_usage)
    return Load(
        running=message.running,
        waiting=message.waiting,
        kv_usage=message.kv_usage,
        open_leases=message.open_leases,
        reserved_tokens=message.reserved_tokens,
        draining=message.draining,
        lease_tokens=message.lease_tokens,
        oldest_lease_s=seconds(message.oldest_lease_age),
        work=work_from_proto(message.work),
    )


def work_to_proto(work: EngineWork) -> worker_pb2.EngineWork:
    return worker_pb2.EngineWork(
        steps=work.steps,
        seconds=work.seconds,
        prefill_tokens=work.prefill_tokens,
        prefill_pairs=work.prefill_pairs,
        sequences=work.sequences,
        kv_usage=work.kv_usage,
    )


def work_from_proto(message: worker_pb2.EngineWork) -> EngineWork:
    """Raises as `load_from_proto`."""
    for name in ("seconds", "kv_usage"):
        value = getattr(message, name)
        _require(f"work.{name}", math.isfinite(value), value)
    return EngineWork(
        steps=message.steps,
        seconds=message.seconds,
        prefill_tokens=message.prefill_tokens,
        prefill_pairs=message.prefill_pairs,
        sequences=message.sequences,
        kv_usage=message.kv_usage,
    )


def cache_change_to_proto(change: CacheChange, sequence: int) -> worker_pb2.WatchCacheResponse:
    return worker_pb2.WatchCacheResponse(
        sequence=sequence, anew=change.anew, added=change.added, removed=change.removed
    )


def cache_change_from_proto(message: worker_pb2.WatchCacheResponse) -> CacheChange:
    return CacheChange(message.anew, message.added, message.removed)


def _require(name: str, good: bool, value: float) -> None:
    """One worker's nonsense must end its own link, not every request's plan."""
    if not good:
        raise DecodeError(ErrorReason.INTERNAL, f"the worker says that its {name} is {value}")
