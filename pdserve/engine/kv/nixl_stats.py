"""What the workers tell the front end of transfers over NIXL, with the steps' statistics."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from pdserve.errors import DecodeError
from pdserve.types import LeaseEnd


class NixlStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's own, and besides, to be read by `pdserve.engine.vllm_stats`: `fetched` as (the
    holder's request id, seconds), `failures` as (that id, reason, message), `ended` as (request
    id here, LeaseEnd)."""

    def reset(self) -> None:
        super().reset()
        self.data |= {"fetched": [], "failures": [], "ended": []}

    def fetched(self, request_id: str, seconds: float) -> None:
        self.data["fetched"].append((request_id, seconds))

    def failed(self, request_id: str, failure: DecodeError) -> None:
        self.data["failures"].append((request_id, failure.reason.name, failure.message))

    def hold_ended(self, request_id: str, end: LeaseEnd) -> None:
        self.data["ended"].append((request_id, end.value))

    def is_empty(self) -> bool:
        told = self.data["fetched"] or self.data["failures"] or self.data["ended"]
        return not told and bool(super().is_empty())
