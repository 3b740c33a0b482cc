"""Our own connector: KV blocks over gRPC, from worker to worker, while the prompt is read.

vLLM 0.32 makes one per process, by way of `connector`; the work is in its two halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from pdserve.config import FleetConfig
from pdserve.engine.kv.grpc_scheduler import GrpcScheduler, StepOrders
from pdserve.engine.kv.grpc_stats import GrpcStats
from pdserve.engine.kv.grpc_worker import GrpcWorker
from pdserve.engine.kv.layout import block_layout, kv_dtype, required_layout
from pdserve.fleet_key import read_key


@dataclass
class Ports(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where the worker of a rank serves; 0 where it does not."""

    port: int


class PdGrpcConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The facade; see `GrpcScheduler` and `GrpcWorker`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the gRPC KV transport serves models with one kind of KV cache")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._scheduler: GrpcScheduler | None = None
        self._worker: GrpcWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = GrpcScheduler(vllm_config.cache_config.block_size)
        else:
            path = extra["key_file"]
            self._worker = GrpcWorker(
                get_tensor_model_parallel_rank(),
                read_key(FleetConfig(key_file=None if path is None else Path(path))),
                extra,
                vllm_config.kv_transfer_config.kv_role,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return required_layout(vllm_config)

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler.cache_manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._of_scheduler.ports = [
            ports.port for _, ports in sorted(metadata.items()) if isinstance(ports, Ports)
        ]

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        number = self._of_scheduler.num_matched_tokens(request, num_computed_tokens)
        return number, number > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        self._of_scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._of_scheduler.take_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.received(set(connector_output.finished_recving or ()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config = self._vllm_config
        self._of_worker.register(
            kv_caches,
            self._kv_cache_config.num_blocks,
            config.cache_config.block_size,
            block_layout(config, required_layout(config)),
            kv_dtype(config),
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Ports(self._of_worker.port)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._of_worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        self._of_worker.after_step(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._of_worker.results()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return GrpcStats(data)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def _of_scheduler(self) -> GrpcScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _of_worker(self) -> GrpcWorker:
        assert self._worker is not None
        return self._worker
