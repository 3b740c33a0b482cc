"""The transports that an engine has, as vLLM is told of them: one connector for each."""

from __future__ import annotations

from typing import Any

from pdserve.engine.kv import grpc, nixl
from pdserve.types import GrpcDescriptor, NixlDescriptor, Role

TRANSPORTS = (NixlDescriptor.transport, GrpcDescriptor.transport)
"""All there are, best first."""
_CONNECTORS = {
    NixlDescriptor.transport: (nixl.CONNECTOR_MODULE, nixl.CONNECTOR_CLASS),
    GrpcDescriptor.transport: (grpc.CONNECTOR_MODULE, grpc.CONNECTOR_CLASS),
}


def transfer_config(roles: frozenset[Role], extras: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of vLLM's KVTransferConfig; `extras` is each transport's own configuration."""
    role = _kv_role(roles)
    connectors = []
    for transport, extra in extras.items():
        module, name = _CONNECTORS[transport]
        connectors.append(_connector(module, name, role) | {"kv_connector_extra_config": extra})
    whole = _connector("pdserve.engine.kv.connector", "PdConnector", role)
    return whole | {"kv_connector_extra_config": {"connectors": connectors}}


def _connector(module: str, name: str, role: str) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        # A hand-off that fails is reported, never silently computed again.
        "kv_load_failure_policy": "fail",
    }


def _kv_role(roles: frozenset[Role]) -> str:
    if roles == {Role.PREFILL}:
        return "kv_producer"
    return "kv_consumer" if roles == {Role.DECODE} else "kv_both"
