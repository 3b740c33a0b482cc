"""The half of the connector in `VLLM::EngineCore`: which blocks are on lease, and to whom."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from pdserve.engine.kv import lease
from pdserve.engine.kv.nixl import LEASE_KEY, RELEASE_KEY, RENEW_KEY

_POLL_MS = 200


class LeasingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Keeps the leases, ends them on request, and answers readers who ask about them.

    `_leases` is changed by the engine's thread and read by the side channel's.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.side_channel_host = extra["side_channel_host"]
        self.side_channel_port = extra["side_channel_port"]
        self._leases: dict[str, lease.BlockGroups] = {}
        self._released: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if (ended := params.get(RELEASE_KEY)) is not None:
            # Either the id inside the engine, or the one that the engine made it from.
            self._released.update(
                held for held in self._leases if ended in (held, get_base_request_id(held))
            )
            return
        if (renewed := params.get(RENEW_KEY)) is not None:
            if renewed in self._leases:
                # The worker takes the new time for one whose blocks it still holds.
                self._reqs_need_send[renewed] = time.perf_counter() + params[LEASE_KEY]
            return
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished(request, block_ids)
        if delayed and params is not None:
            self._leases[request.request_id] = lease.block_groups(params["remote_block_ids"])
            lease_s = request.kv_transfer_params.get(LEASE_KEY)
            if lease_s is not None:
                self._reqs_need_send[request.request_id] = time.perf_counter() + lease_s
        return delayed, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        # A lease may have ended since it was asked to end.
        meta.released = self._released & self._leases.keys()
        self._released = set()
        # Requests that wait for blocks, or read them, are not to be kept waiting.
        meta.idle = not (meta.released or meta.reqs_to_recv or self._heartbeat_req_engine)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        # vLLM frees these blocks right after this call: from here on readers are told no.
        for request_id in connector_output.finished_sending or ():
            self._leases.pop(request_id, None)
        super().update_connector_output(connector_output)

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        encoder = msgspec.msgpack.Encoder()
        encoded = {ranks: encoder.encode(payload) for ranks, payload in metadata.items()}
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.IPV6, 1 if ":" in self.side_channel_host else 0)
        router.bind(lease.endpoint(self.side_channel_host, self.side_channel_port))
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.side_channel_port = int(bound.rsplit(":", 1)[1])
        self._nixl_handshake_listener_t = threading.Thread(
            target=self._serve_side_channel,
            args=(context, router, encoded),
            daemon=True,
            name="nixl_handshake_listener",
        )
        self._nixl_handshake_listener_t.start()

    def _serve_side_channel(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        encoded: dict[tuple[int, int], bytes],
    ) -> None:
        try:
            while not self._stop_event.is_set():
                if router.poll(_POLL_MS):
                    identity, _, message = router.recv_multipart()
                    router.send_multipart([identity, b"", *self._reply(message, encoded)])
        finally:
            context.destroy(linger=0)

    def _reply(self, message: bytes, encoded: dict[tuple[int, int], bytes]) -> list[bytes]:
        kind, first, second, *_ = msgspec.msgpack.decode(message)
        if kind == lease.QUESTION:
            return [lease.answer(message, self._holds)]
        if kind != GET_META_MSG:
            return [b""]
        # As vLLM's own listener: the clock lets the other side estimate the offset to this one.
        return [encoded[first, second], msgspec.msgpack.encode(time.perf_counter())]

    def _holds(self, request_id: str, blocks: lease.BlockGroups) -> bool:
        return self._leases.get(request_id) == blocks
