"""The lease table of exported KV: what is held for whom, since when. Pure: time is passed in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdserve.types import LeaseEnd, LeaseSnapshot

AGES_S = (("0-1s", 1.0), ("1-10s", 10.0), ("10-60s", 60.0), ("60s-", float("inf")))
"""Ages by which held tokens are told apart: name, and the seconds below which it ends."""


@dataclass(slots=True)
class _Lease:
    num_tokens: int
    opened: float
    expiry: float


class LeaseTable:
    """Each handle id is opened once and ends once. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._open: dict[str, _Lease] = {}
        self._ended = Counter({end.value: 0 for end in LeaseEnd})

    def open(self, handle_id: str, num_tokens: int, now: float, lease_s: float) -> None:
        """Raises ValueError for an id that is open."""
        if handle_id in self._open:
            raise ValueError(f"lease {handle_id} is open")
        self._open[handle_id] = _Lease(num_tokens, now, now + lease_s)

    def renew(self, handle_id: str, now: float, lease_s: float) -> None:
        """Has an open lease expire `lease_s` from now."""
        self._open[handle_id].expiry = now + lease_s

    def left_s(self, handle_id: str, now: float) -> float:
        """How long an open lease still runs; not above 0 once it has expired."""
        return self._open[handle_id].expiry - now

    def end(self, handle_id: str, end: LeaseEnd) -> None:
        """Quiet for an id that is not open."""
        if self._open.pop(handle_id, None) is not None:
            self._ended[end] += 1

    def snapshot(self, now: float) -> LeaseSnapshot:
        """May be called from any thread."""
        leases = tuple(self._open.values())
        by_age = {name: 0 for name, _ in AGES_S}
        for lease in leases:
            age = now - lease.opened
            by_age[next(name for name, below in AGES_S if age < below)] += lease.num_tokens
        return LeaseSnapshot(
            open=len(leases),
            oldest_s=max((now - lease.opened for lease in leases), default=0.0),
            tokens_by_age=by_age,
            ended=dict(self._ended),
        )
