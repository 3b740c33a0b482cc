"""The half of the connector in `VLLM::EngineCore`: which blocks are on lease, and to whom."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from pdserve.engine.kv import lease
from pdserve.engine.kv.nixl import LEASE_KEY, RELEASE_KEY, RENEW_KEY
from pdserve.engine.kv.side_channel import HeldBlocks, SideChannel


class LeasingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Keeps the leases, ends them on request, and answers readers who ask about them.

    `_held` is changed by the engine's thread and read by the side channel's.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.side_channel_host = extra["side_channel_host"]
        self.side_channel_port = extra["side_channel_port"]
        self._held = HeldBlocks(engine_id)
        self._side_channel: SideChannel | None = None
        self._released: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if (ended := params.get(RELEASE_KEY)) is not None:
            # Either the id inside the engine, or the one that the engine made it from.
            self._released.update(
                held
                for held in self._held.request_ids
                if ended in (held, get_base_request_id(held))
            )
            return
        if (renewed := params.get(RENEW_KEY)) is not None:
            if renewed in self._held:
                # The worker takes the new time for one whose blocks it still holds.
                self._reqs_need_send[renewed] = time.perf_counter() + params[LEASE_KEY]
            return
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished(request, block_ids)
        if delayed and params is not None:
            blocks = lease.block_groups(params["remote_block_ids"])
            self._held.hold(request.request_id, blocks)
            lease_s = request.kv_transfer_params.get(LEASE_KEY)
            if lease_s is not None:
                self._reqs_need_send[request.request_id] = time.perf_counter() + lease_s
        return delayed, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        # A lease may have ended since it was asked to end.
        meta.released = self._released & self._held.request_ids
        self._released = set()
        # Requests that wait for blocks, or read them, are not to be kept waiting.
        meta.idle = not (meta.released or meta.reqs_to_recv or self._heartbeat_req_engine)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        # vLLM frees these blocks right after this call: from here on readers are told no.
        for request_id in connector_output.finished_sending or ():
            self._held.end(request_id)
        super().update_connector_output(connector_output)

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        encoder = msgspec.msgpack.Encoder()
        encoded = {ranks: encoder.encode(payload) for ranks, payload in metadata.items()}

        def answer(message: bytes) -> list[bytes]:
            kind, first, second, *_ = msgspec.msgpack.decode(message)
            if kind == lease.QUESTION:
                return [lease.answer(message, self._held.refusal)]
            if kind != GET_META_MSG:
                raise ValueError("it is neither a handshake nor a question")
            # As vLLM's own listener: the clock lets the other side estimate the offset to this.
            return [encoded[first, second], msgspec.msgpack.encode(time.perf_counter())]

        address = self.side_channel_host, self.side_channel_port
        self._side_channel = SideChannel(address, answer)
        self.side_channel_port = self._side_channel.port

    def shutdown(self) -> None:
        if self._side_channel is not None:
            self._side_channel.close()
