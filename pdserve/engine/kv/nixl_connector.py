"""vLLM's NIXL pull connector with leases that can be ended and reads that are verified.

vLLM 0.32 loads it in the engine's processes (`kv_connector_module_path`). vLLM's own
connector has faults that are mended in the two halves of this one:

* blocks of a prompt that nobody fetches stay held to the end of the lease: `RELEASE_KEY`;
* a reader cannot tell the blocks of its prompt from blocks that were given away meanwhile: it
  asks their holder after the read, and lets it free them only then (`lease`);
* a prefill engine that is dead or stopped is waited for long, or for ever: ping, silence;
* a malformed descriptor ends the decode engine: only its request fails;
* a side channel port that is taken hangs the start: it is bound before anything waits;
* one message that is no handshake ends the side channel: `side_channel`;
* nobody is told how a hold ended, nor why a read failed: `nixl_stats`;
* the compute thread is moved to another core and NIXL's thread spins: `mends`.
"""

from __future__ import annotations

from typing import Any

from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

from pdserve.engine.kv.nixl_scheduler import LeasingScheduler
from pdserve.engine.kv.nixl_stats import NixlStats
from pdserve.engine.kv.nixl_worker import VerifyingWorker

_WRITTEN_FOR = "0.32."


class PdNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The facade that vLLM makes one of per process; the work is in its two halves."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if not __version__.startswith(_WRITTEN_FOR):
            raise RuntimeError(
                f"pdserve mends the NIXL connector of vLLM {_WRITTEN_FOR}x and this is "
                f"{__version__}: see pdserve/engine/kv"
            )
        # Not NixlPullConnector's: it would make vLLM's own halves, and a NIXL agent with them.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LeasingScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            self.connector_worker = VerifyingWorker(vllm_config, self.engine_id, kv_cache_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return NixlStats(data=data or {})
