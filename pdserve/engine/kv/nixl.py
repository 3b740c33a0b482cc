"""What the front end knows of a hand-off over NIXL: vLLM's configuration and its parameters.

vLLM's `kv_transfer_params` dict is spoken here and in `nixl_connector` alone. Written for
vLLM 0.32 and NIXL 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.types import NixlDescriptor

CONNECTOR_MODULE = "pdserve.engine.kv.nixl_connector"
CONNECTOR_CLASS = "PdNixlConnector"

RELEASE_KEY = "pdserve_release"
"""In `kv_transfer_params`: the id of a request whose blocks are to be freed."""
RENEW_KEY = "pdserve_renew"
"""In `kv_transfer_params`: the id of a request whose blocks are to be held for longer."""
LEASE_KEY = "pdserve_lease_s"
"""In `kv_transfer_params` of a prefill or a renewal: seconds that its blocks are held at least."""

MIN_LEASE_S = 6
"""vLLM renews leases every sixth of their length, in whole seconds."""


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """How an engine takes part in hand-offs over NIXL.

    `host` is the address that decode engines reach this engine's side channel at, and that it
    listens on; `port` 0 picks a free one. `lease_s` (whole seconds, MIN_LEASE_S at least) is
    how long blocks are held without a sign of life from their reader, `transfer_timeout_s` how
    long one read may take while their holder is alive. Decode engines trust prefill engines
    of the same `model_revision`, whatever the folder that each loaded it from.
    """

    model_revision: str
    host: str
    port: int = 0
    lease_s: int = 30
    transfer_timeout_s: float = 60.0


def extra_config(config: NixlConfig) -> dict[str, Any]:
    """The connector's part of vLLM's KVTransferConfig."""
    return {
        "kv_lease_duration": config.lease_s,
        "side_channel_host": config.host,
        "side_channel_port": config.port,
        "transfer_timeout_s": config.transfer_timeout_s,
        "model_revision": config.model_revision,
    }


def prefill_params(lease_s: float) -> dict[str, Any]:
    """`kv_transfer_params` of a prompt that is read here and answered elsewhere."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        LEASE_KEY: lease_s,
    }


def decode_params(descriptor: NixlDescriptor) -> dict[str, Any]:
    """`kv_transfer_params` of a prompt that was read elsewhere and is answered here."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": descriptor.engine_id,
        "remote_request_id": descriptor.request_id,
        "remote_block_ids": [list(group) for group in descriptor.block_groups],
        "remote_host": descriptor.host,
        "remote_port": descriptor.port,
        "tp_size": descriptor.tensor_parallel,
    }


def release_params(request_id: str) -> dict[str, Any]:
    """`kv_transfer_params` of the empty request that ends the lease of another."""
    return {RELEASE_KEY: request_id}


def renew_params(request_id: str, lease_s: float) -> dict[str, Any]:
    """`kv_transfer_params` of the empty request that renews the lease of another."""
    return {RENEW_KEY: request_id, LEASE_KEY: lease_s}


def to_descriptor(params: dict[str, Any]) -> NixlDescriptor:
    """The descriptor in the `kv_transfer_params` that a finished prefill gives out.

    Raises ValueError if vLLM held no blocks for it.
    """
    groups = tuple(tuple(int(block) for block in group) for group in params["remote_block_ids"])
    if not any(groups):
        raise ValueError("the engine holds no blocks for the prompt")
    return NixlDescriptor(
        engine_id=params["remote_engine_id"],
        request_id=params["remote_request_id"],
        block_groups=groups,
        host=params["remote_host"],
        port=params["remote_port"],
        tensor_parallel=params["tp_size"],
    )


def covers(descriptor: NixlDescriptor, num_tokens: int, block_size: int) -> bool:
    """Whether the descriptor's blocks are exactly those of a prompt of `num_tokens` tokens.

    vLLM takes fewer blocks than the prompt needs for a bug of its own and ends the engine.
    """
    needed = -(-num_tokens // block_size)
    return all(len(group) == needed for group in descriptor.block_groups)
