"""The shared key of a fleet: who must carry it, how it is checked and how it is sent."""

from __future__ import annotations

import hmac
from typing import Any

import grpc

from pdserve.config import FleetConfig, Listen
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.rpc_errors import Context, Continuation, Handler, abort

_HEALTH_PREFIX = "/grpc.health.v1.Health/"


def read_key(fleet: FleetConfig) -> str | None:
    """The key in `fleet.key_file`, without surrounding white space; None without a file.

    Raises ConfigError when the file cannot be read or holds no usable key.
    """
    if fleet.key_file is None:
        return None
    try:
        key = fleet.key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"fleet.key_file: cannot read {fleet.key_file}: {reason}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"fleet.key_file: {fleet.key_file} must hold one line of printable ASCII characters"
        )
    return key


def require_trust(listen: Listen, fleet: FleetConfig) -> None:
    """Raises ConfigError where anyone on the network could use a worker."""
    if not (listen.is_loopback or fleet.key_file or fleet.allow_anonymous):
        raise ConfigError(
            f"refusing to listen on {listen.address} without a fleet key; set fleet.key_file, "
            "or fleet.allow_anonymous where the network is trusted"
        )


def carries_key(authorization: str | bytes | None, key: str) -> bool:
    """Whether an `authorization` value is `Bearer KEY`; takes as long for any wrong one."""
    given = authorization if isinstance(authorization, bytes) else (authorization or "").encode()
    return hmac.compare_digest(given, f"Bearer {key}".encode())


class FleetKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the key; health checks need none."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if not handler_call_details.method.startswith(_HEALTH_PREFIX):
            metadata = dict(handler_call_details.invocation_metadata or ())
            if not carries_key(metadata.get("authorization"), self._key):
                return refusing(
                    RejectedError(ErrorReason.UNAUTHENTICATED, "the fleet key is missing or wrong")
                )
        return await continuation(handler_call_details)


def refusing(error: RejectedError) -> Handler:
    """A handler that ends any call, whatever its shape, before it reads a message."""

    async def refuse(_: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def call_metadata(key: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that a call must carry to pass a `FleetKeyInterceptor`."""
    return () if key is None else (("authorization", f"Bearer {key}"),)
