"""What the front end knows of a hand-off over gRPC: the connector's configuration and orders.

An order to the connector is a plain dict under `ORDER_KEY` in vLLM's `kv_transfer_params`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pdserve.types import GrpcDescriptor

CONNECTOR_MODULE = "pdserve.engine.kv.grpc_connector"
CONNECTOR_CLASS = "PdGrpcConnector"

ORDER_KEY = "pdserve_grpc"


class Kind(StrEnum):
    """What an order asks for; each carries what its function below gives it."""

    PORTS = "ports"
    HOLD = "hold"
    FETCH = "fetch"
    RENEW = "renew"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """How an engine takes part in hand-offs over gRPC.

    `host` is the address that decode engines reach this engine's workers at, and that they
    listen on: rank r on `port` + r, or each on a free port where that is 0. `epoch` is random
    at each start. `timeout_s` is how long a holder that lives may send nothing.
    `key_file` holds the fleet key that readers must carry.
    """

    host: str
    epoch: str
    port: int = 0
    timeout_s: float = 60.0
    key_file: Path | None = None


def extra_config(config: GrpcConfig) -> dict[str, Any]:
    """The connector's part of vLLM's KVTransferConfig."""
    return {
        "host": config.host,
        "port": config.port,
        "epoch": config.epoch,
        "timeout_s": config.timeout_s,
        "key_file": None if config.key_file is None else str(config.key_file),
    }


def new_descriptor(config: GrpcConfig, ports: tuple[int, ...]) -> GrpcDescriptor:
    """Of a prompt that is about to be read."""
    return GrpcDescriptor(secrets.token_hex(16), config.epoch, config.host, ports)


def ports_params() -> dict[str, Any]:
    """Asks for the ports of the engine's workers, in `kv_transfer_params` of the answer."""
    return {ORDER_KEY: {"kind": Kind.PORTS}}


def hold_params(descriptor: GrpcDescriptor, lease_s: float) -> dict[str, Any]:
    """Of a prompt whose blocks are given out while it is read, and held so long afterwards."""
    return _order(Kind.HOLD, descriptor, lease_s=lease_s)


def fetch_params(descriptor: GrpcDescriptor) -> dict[str, Any]:
    """Of a prompt that is read elsewhere and answered here."""
    return _order(
        Kind.FETCH,
        descriptor,
        epoch=descriptor.epoch,
        host=descriptor.host,
        ports=list(descriptor.ports),
    )


def renew_params(descriptor: GrpcDescriptor, lease_s: float) -> dict[str, Any]:
    """Of the empty request that lengthens a hold."""
    return _order(Kind.RENEW, descriptor, lease_s=lease_s)


def release_params(descriptor: GrpcDescriptor) -> dict[str, Any]:
    """Of the empty request that ends a hold."""
    return _order(Kind.RELEASE, descriptor)


def _order(kind: Kind, descriptor: GrpcDescriptor, **rest: Any) -> dict[str, Any]:
    return {ORDER_KEY: {"kind": kind, "transfer_id": descriptor.transfer_id, **rest}}
