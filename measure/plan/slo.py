"""What a fleet must keep to, and what it sees of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_FORGIVEN = 0.01
"""What a 99th percentile lets pass."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds, at the 99th percentile: of requests to their first token, and of tokens after it
    to the next."""

    ttft_p99_s: float
    itl_p99_s: float


class Constraint(StrEnum):
    """What keeps a fleet from serving more."""

    TTFT = "time to first token"
    ITL = "inter-token latency"
    KV = "KV cache"
    FAILURES = "failed requests"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds, as in Slo; the part of prompt tokens that were found in a cache, and the part of
    requests for which no worker that writes had room in its KV cache when their turn came.

    Where others read for these (`splits`), such a request would be read by a worker that writes
    after all, beside the answers of others: then it is no split any more.
    """

    ttft_p99_s: float
    itl_p99_s: float
    hit_rate: float
    without_room: float
    splits: bool

    def broken(self, slo: Slo) -> Constraint | None:
        """What of the SLO is not met, and why; of two the one that is missed by more."""
        crowded = self.without_room > _FORGIVEN
        late = self.ttft_p99_s / slo.ttft_p99_s
        slow = self.itl_p99_s / slo.itl_p99_s
        if max(late, slow) <= 1:
            return Constraint.KV if self.splits and crowded else None
        if slow >= late:
            return Constraint.ITL
        return Constraint.KV if crowded else Constraint.TTFT
