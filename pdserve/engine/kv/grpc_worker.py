"""The gRPC connector's half in the process that computes: gives out blocks, and fetches them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from pdserve.engine.kv.blocks import CacheShape, block_rows, block_store
from pdserve.engine.kv.grpc_fetch import Fetcher
from pdserve.engine.kv.grpc_scheduler import StepOrders
from pdserve.engine.kv.grpc_server import TransferServer
from pdserve.engine.kv.grpc_stats import GrpcStats
from pdserve.engine.kv.holds import Hold, HoldTable
from pdserve.types import LeaseEnd

logger = init_logger("vllm." + __name__)


class GrpcWorker:
    """Called by vLLM's model runner, in its own thread alone; holds and fetches have theirs."""

    def __init__(self, rank: int, key: str | None, extra: dict[str, Any], roles: str) -> None:
        """`extra` is what `grpc.extra_config` gives, `roles` vLLM's `kv_role`."""
        self._rank = rank
        self._key = key
        self._extra = extra
        self._roles = roles
        self._holds = HoldTable()
        self._requests: dict[str, str] = {}
        self._server: TransferServer | None = None
        self._stats = GrpcStats()

    def register(
        self, kv_caches: dict[str, Any], num_blocks: int, block_size: int, layout: str, dtype: str
    ) -> None:
        """Begins to serve, where the engine reads prompts for others. Raises ConfigError."""
        rows = block_rows(kv_caches, num_blocks)
        store = block_store(rows)
        self._store = store
        shape = CacheShape(block_size, len(rows), rows[0].shape[1], layout, dtype)
        extra = self._extra
        self._fetcher = Fetcher(store, shape, self._rank, self._key, extra["timeout_s"])
        if self._roles == "kv_consumer":
            return
        port = extra["port"] and extra["port"] + self._rank
        self._server = TransferServer(
            (extra["host"], port), self._holds, store, shape, extra["epoch"], self._key
        )

    @property
    def port(self) -> int:
        """0 where nothing is served."""
        return self._server.port if self._server is not None else 0

    def before_step(self, orders: StepOrders) -> None:
        """Takes back what the step may overwrite."""
        for transfer_id in orders.withdrawn:
            self._holds.close(transfer_id, LeaseEnd.LOST)
        for transfer_id in orders.rewound:
            hold = self._holds.get(transfer_id)
            if hold is not None:
                hold.rewind()
        for announced in orders.announced:
            self._holds.open(
                Hold(announced.transfer_id, announced.num_tokens, announced.num_blocks)
            )

    def after_step(self, orders: StepOrders) -> None:
        """The step's work is on its way: what it computes can be given out, once written."""
        for computed in orders.computed:
            hold = self._holds.get(computed.transfer_id)
            if hold is not None:
                hold.extend(computed.blocks, computed.readable, self._store.written())
        for transfer_id, (request_id, lease_s) in orders.finished.items():
            self._requests[transfer_id] = request_id
            self._holds.expire_at(transfer_id, lease_s)
        for transfer_id, lease_s in orders.renewed.items():
            if transfer_id in self._requests:
                self._holds.expire_at(transfer_id, lease_s)
        for transfer_id in orders.released:
            hold = self._holds.get(transfer_id)
            if hold is not None:
                hold.finish(LeaseEnd.RELEASED)
        for request_id in orders.cancelled:
            self._fetcher.cancel(request_id)
        for order in orders.fetches:
            self._fetcher.start(order)

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for transfer_id, end in self._holds.sweep().items():
            results.finished_sending.add(self._requests.pop(transfer_id))
            self._stats.hold_ended(transfer_id, end)
            if end is LeaseEnd.EXPIRED:
                logger.warning("KV blocks were held to the end and not fetched")
        for fetched in self._fetcher.finished():
            results.finished_recving.add(fetched.order.request_id)
            if fetched.failure is None:
                self._stats.fetched(fetched.order.transfer_id, fetched.num_bytes, fetched.seconds)
            else:
                results.failed_recving.add(fetched.order.request_id)
                self._stats.failed(fetched.order.transfer_id, fetched.failure)
        return results

    def take_stats(self) -> GrpcStats | None:
        stats, self._stats = self._stats, GrpcStats()
        return None if stats.is_empty() else stats

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._fetcher.close()
