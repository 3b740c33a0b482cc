"""The half in the process that computes: reads blocks, verifies the reads, ends leases."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import Any

from nixl._api import nixlBind
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)
from vllm.logger import init_logger

from pdserve.engine.kv import lease
from pdserve.engine.kv.layout import block_layout
from pdserve.engine.kv.mends import cores_kept, progress_thread_paced
from pdserve.engine.kv.nixl_stats import NixlStats
from pdserve.errors import DecodeError
from pdserve.types import LeaseEnd

logger = init_logger("vllm." + __name__)

_ANSWER_WAIT_S = 0.002
"""How long a step waits for a holder's answer: without it each hand-off costs one step more."""


@dataclasses.dataclass(slots=True)
class _Source:
    """Where the read that is being posted comes from; `notice` tells the holder to free it."""

    lease: lease.Lease
    notice: bytes | None = None

    def take_notice(self) -> bytes | None:
        notice, self.notice = self.notice, None
        return notice


class VerifyingWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Reports a read as done only when its blocks were still on lease at its end."""

    xfer_handshake_metadata: Any

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._model_revision = extra["model_revision"]
        self._transfer_timeout_s = extra["transfer_timeout_s"]
        self._watcher = lease.LeaseWatcher()
        self._source: _Source | None = None
        self._began: dict[str, float] = {}
        self._given_up: set[str] = set()
        self._released: set[str] = set()
        with cores_kept(), progress_thread_paced(nixlBind):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = NixlStats()
        self._hold_back_notices()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """As vLLM's, but engines match by model revision and layout, not by the folder's name."""
        super().register_kv_caches(kv_caches)
        named = copy.copy(self.vllm_config)
        named.model_config = copy.copy(self.vllm_config.model_config)
        named.model_config.model = (
            f"{self._model_revision} {block_layout(self.vllm_config, self.kv_cache_layout)}"
        )
        self.compat_hash = compute_nixl_compatibility_hash(
            named, self.backend_name, self._TRANSFER_MODE
        )
        self.xfer_handshake_metadata = dataclasses.replace(
            self.xfer_handshake_metadata, compatibility_hash=self.compat_hash
        )

    # The holder's side.

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        for request_id in metadata.released:
            # Not there if its reader has told us meanwhile that it is done.
            if request_id in self._reqs_to_process:
                self._reqs_to_process.remove(request_id)
                self._reqs_to_send.pop(request_id, None)
                self.consumer_notification_counts_by_req.pop(request_id, None)
                self.expected_consumer_notifications_by_req.pop(request_id, None)
                self._released.add(request_id)

    def _get_new_notifs(self) -> set[str]:
        fetched: set[str] = super()._get_new_notifs()
        self._tell_ended(fetched, LeaseEnd.FETCHED)
        return fetched

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        self._tell_ended(done_sending - before, LeaseEnd.EXPIRED)
        self._tell_ended(self._released, LeaseEnd.RELEASED)
        done_sending.update(self._released)
        self._released.clear()

    def _tell_ended(self, request_ids: set[str], end: LeaseEnd) -> None:
        for request_id in request_ids:
            self.xfer_stats.hold_ended(request_id, end)

    # The reader's side.

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        _, engine_id = args[:2]
        lease.ping((host, port), engine_id)
        return super()._nixl_handshake(host, port, *args, **kwargs)

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: Any = None,
        **context: Any,
    ) -> None:
        super()._log_failure(failure_type, req_id, msg, error, meta, **context)
        if isinstance(error, DecodeError) and req_id is not None:
            remote = (meta or self._recving_metadata[req_id]).remote
            self.xfer_stats.failed(remote.request_id, error)

    def _hold_back_notices(self) -> None:
        """Takes the notice that frees the holder's blocks off each read: it is sent later."""
        make_read = self.nixl_wrapper.make_prepped_xfer

        def make_silent_read(*args: Any, notif_msg: bytes, **kwargs: Any) -> Any:
            assert self._source is not None
            self._source.notice = notif_msg
            return make_read(*args, **kwargs)

        self.nixl_wrapper.make_prepped_xfer = make_silent_read

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        remote = meta.remote
        # Before vLLM maps the block numbers to those of its kernels.
        blocks = lease.block_groups(remote.block_ids)
        self._source = _Source(
            lease.Lease((remote.host, remote.port), remote.engine_id, remote.request_id, blocks)
        )
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as error:
            # vLLM's own code ends the engine, and every other request with it.
            self._log_failure("transfer_setup_failed", req_id, error=error)
            self._handle_failed_transfer(req_id, None, self._recv_failures)
        finally:
            self._source = None

    def _read_blocks(self, **kwargs: Any) -> bool:
        source, request_id = self._source, kwargs["request_id"]
        assert source is not None
        posted = bool(super()._read_blocks(**kwargs))
        notice = source.take_notice()
        if not posted or not self._recving_transfers.get(request_id):
            return posted  # failed, or nothing to read
        if notice is None:
            raise RuntimeError("vLLM posts NIXL reads in another way; they cannot be verified")
        rank = (0, kwargs["read_spec"].remote_rank)
        agent = self._remote_agents[kwargs["dst_engine_id"]][rank]
        self._pending_recv_notifs.setdefault(request_id, []).append((agent, notice))
        self._watcher.begin(request_id, source.lease)
        self._began.setdefault(request_id, time.monotonic())
        return True

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if not self._began:
            return done, failed
        # Those in _recv_failures are about to be reported as failed by the caller.
        for request_id in done - failed - self._recv_failures:
            if self._watcher.watches(request_id):
                self._watcher.read_ended(request_id)
                done.discard(request_id)
        for request_id, verdict in self._watcher.pump(_ANSWER_WAIT_S).items():
            if request_id in transfers:
                self._check_running_read(request_id, verdict)
            elif request_id in failed or verdict is not lease.Verdict.OPEN:
                done.add(request_id)
                if verdict is lease.Verdict.VOID and request_id not in self._given_up:
                    self._log_failure(
                        "lease_lost", request_id, error=self._watcher.failure(request_id)
                    )
                    self._handle_failed_transfer(request_id, None, failed)
        for request_id in done:
            self._watcher.end(request_id)
            began = self._began.pop(request_id, None)
            if began is not None and request_id not in failed:
                holder = self._recving_metadata[request_id].remote
                self.xfer_stats.fetched(holder.request_id, time.monotonic() - began)
            self._given_up.discard(request_id)
        return done, failed

    def _check_running_read(self, request_id: str, verdict: lease.Verdict) -> None:
        """Fails the request of a read that will not end well, at once.

        Its blocks stay taken until NIXL lets go of them: their holder's machine may still
        write there.
        """
        late = time.monotonic() - self._began[request_id] > self._transfer_timeout_s
        if (late or verdict is lease.Verdict.VOID) and request_id not in self._given_up:
            self._given_up.add(request_id)
            void = verdict is lease.Verdict.VOID
            failure = self._watcher.failure(request_id) if void else None
            self._log_failure("read_given_up", request_id, error=failure)
            self.xfer_stats.record_failed_transfer()
            meta = self._recving_metadata[request_id]
            if not self._is_hma_required:
                self._invalid_block_ids.put(set(meta.local_block_ids[0]))

    def shutdown(self) -> None:
        super().shutdown()
        self._watcher.close()
