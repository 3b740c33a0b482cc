"""Which worker of a pool is taken: policies by name. A new one is a file here and a row below."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coordinator.policy.balance.least_outstanding import least_outstanding
from coordinator.policy.balance.pick import Pick
from coordinator.policy.balance.power_of_two import power_of_two
from coordinator.policy.balance.prefix_aware import prefix_aware
from coordinator.policy.balance.round_robin import round_robin

POLICIES: Mapping[str, Pick] = MappingProxyType(
    {
        "least-outstanding": least_outstanding,
        "power-of-two": power_of_two,
        "prefix-aware": prefix_aware,
        "round-robin": round_robin,
    }
)
