"""The connector that vLLM 0.32 makes of the transports that an engine has, one or both.

vLLM loads it in the engine's processes (`kv_connector_module_path`). Each request carries the
parameters of one transport, and the connectors of the others leave it alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)

_IDLE_S = 0.005
"""How often an engine that has nothing to do but wait for transfers looks whether they ended."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Of one worker: that of each of its connectors, in their order."""

    parts: list[KVConnectorHandshakeMetadata | None]


class _Uncounted(KVConnectorPromMetrics):  # type: ignore[misc]
    """For vLLM's own metrics, which nobody reads: `pdserve.metrics` counts transfers."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        pass


class PdConnector(MultiConnector):  # type: ignore[misc]
    """vLLM's own MultiConnector, but that every transport gets its handshakes, and that an
    engine which waits does not spin."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Handshake([each.get_handshake_metadata() for each in self._connectors])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for place, connector in enumerate(self._connectors):
            parts = {
                ranks: part
                for ranks, handshake in metadata.items()
                if (part := handshake.parts[place]) is not None
            }
            connector.set_xfer_handshake_metadata_pp_aware(parts)

    def build_connector_meta(self, scheduler_output: Any) -> MultiKVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        # vLLM repeats a step that only waits for transfers as fast as it can, and sends
        # statistics after each: 1.6 cores.
        if not scheduler_output.total_num_scheduled_tokens and all(
            part.idle for part in meta.metadata
        ):
            time.sleep(_IDLE_S)
        return meta

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return _Uncounted(*args)
