"""What the workers tell the front end of transfers over gRPC, with the steps' statistics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from pdserve.errors import DecodeError
from pdserve.types import LeaseEnd


class GrpcStats(KVConnectorStats):  # type: ignore[misc]
    """`data` has lists, to be read by `pdserve.engine.vllm_stats`: `transfers` as (bytes,
    seconds), `fetched` as (transfer id, seconds), `failures` as (transfer id, reason, message),
    `ended` as (transfer id, LeaseEnd)."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        self.reset()

    def reset(self) -> None:
        for name in ("transfers", "fetched", "failures", "ended"):
            self.data.setdefault(name, [])

    def fetched(self, transfer_id: str, num_bytes: int, seconds: float) -> None:
        self.data["transfers"].append((num_bytes, seconds))
        self.data["fetched"].append((transfer_id, seconds))

    def failed(self, transfer_id: str, failure: DecodeError) -> None:
        self.data["failures"].append((transfer_id, failure.reason.name, failure.message))

    def hold_ended(self, transfer_id: str, end: LeaseEnd) -> None:
        self.data["ended"].append((transfer_id, end.value))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, values in other.data.items():
            self.data[name] += values
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: len(values) for name, values in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())
