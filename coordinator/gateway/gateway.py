"""The gate that every request passes before any work is done for it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from coordinator.capacity import FleetCapacity
from coordinator.catalog import ServedModel
from coordinator.fleet import Fleet
from coordinator.gateway.admission import Admission, Permit
from coordinator.gateway.keys import Caller, KeyRing
from coordinator.gateway.limits import RateLimiter
from coordinator.metrics import CoordinatorMetrics
from coordinator.policy.ticket import Asked, Limits, lower, priority_of
from coordinator.prompts import num_chars
from pdserve.config import GatewayConfig, Listen
from pdserve.errors import ConfigError
from pdserve.types import GenerateSpec


class Gateway:
    """Keys, rates and the admission queue of each model."""

    def __init__(
        self,
        config: GatewayConfig,
        keys: KeyRing,
        models: Mapping[str, ServedModel],
        fleet: Fleet,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._keys = keys
        self._rates = RateLimiter(config.rate)
        self.max_body_bytes = config.max_body_bytes
        self.admissions: Mapping[str, Admission] = {
            name: Admission(
                Limits(config.max_running, config.max_queued, model.config.max_ttft_s),
                FleetCapacity(fleet, model, time.monotonic),
                metrics.admission(name),
                time.monotonic,
            )
            for name, model in models.items()
        }

    def authenticate(self, authorization: str | None) -> Caller:
        """Raises RejectedError UNAUTHENTICATED."""
        return self._keys.authenticate(authorization)

    async def count(self, caller: Caller) -> None:
        """Counts a request that no worker is needed for. Raises RejectedError RATE_LIMITED."""
        await self._rates.check(caller)

    async def enter(self, caller: Caller, spec: GenerateSpec) -> Permit:
        """Counts a request for a served model, and gives it a place to come back with when it
        is tokenised; the permit is the caller's to release.

        Raises RejectedError RATE_LIMITED, QUEUE_FULL or OVERLOADED.
        """
        await self.count(caller)
        asked = Asked(
            tenant=caller.tenant,
            priority=lower(priority_of(spec.priority), caller.max_priority),
            weight=caller.weight,
            arrived=time.monotonic(),
            deadline=spec.deadline,
            prompt_chars=num_chars(spec.prompt),
        )
        return self.admissions[spec.model].arrive(asked)


def require_keys(http: Listen, grpc: Listen, config: GatewayConfig) -> None:
    """Raises ConfigError for a listener beyond loopback that would serve anybody unasked."""
    if config.keys_file is not None or config.allow_anonymous:
        return
    for name, listen in (("http", http), ("grpc", grpc)):
        if not listen.is_loopback:
            raise ConfigError(
                f"{name} listens on {listen.address} without API keys: give a --keys-file, which "
                "`pdserve keys new` makes (coordinator.gateway.keys_file), or set "
                "coordinator.gateway.allow_anonymous for a trusted network"
            )
