"""The gate that every request passes before any work is done for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.gateway.admission import Admission, Permit
from coordinator.gateway.keys import Caller, KeyRing
from coordinator.gateway.limits import RateLimiter
from pdserve.config import GatewayConfig, Listen
from pdserve.errors import ConfigError


class Gateway:
    """Keys, rates and the admission queue of each model."""

    def __init__(self, config: GatewayConfig, keys: KeyRing, models: Iterable[str]) -> None:
        self._keys = keys
        self._rates = RateLimiter(config.rate)
        self.max_body_bytes = config.max_body_bytes
        self.admissions: Mapping[str, Admission] = {
            name: Admission(config.max_running, config.max_queued) for name in models
        }

    def authenticate(self, authorization: str | None) -> Caller:
        """Raises RejectedError UNAUTHENTICATED."""
        return self._keys.authenticate(authorization)

    async def enter(self, caller: Caller, model_name: str, deadline: float | None) -> Permit:
        """Counts the request and waits for a place; the permit is the caller's to release.

        `model_name` is a served model, `deadline` on the monotonic clock. Raises
        RejectedError RATE_LIMITED, QUEUE_FULL or DEADLINE_EXCEEDED.
        """
        await self._rates.check(caller)
        return await self.admissions[model_name].acquire(deadline)


def require_keys(http: Listen, grpc: Listen, config: GatewayConfig) -> None:
    """Raises ConfigError for a listener beyond loopback that would serve anybody unasked."""
    if config.keys_file is not None or config.allow_anonymous:
        return
    for name, listen in (("http", http), ("grpc", grpc)):
        if not listen.is_loopback:
            raise ConfigError(
                f"{name} listens on {listen.address} without API keys: set gateway.keys_file, "
                "or gateway.allow_anonymous for a trusted network"
            )
