"""The lease table of exported KV: who holds what until when. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from pdserve.types import KvDescriptor


@dataclass(frozen=True, slots=True)
class Lease:
    """KV held for a handle; times in seconds on the caller's clock."""

    handle_id: str
    descriptor: KvDescriptor
    opened: float
    expiry: float


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """`oldest_s` is the age in seconds of the oldest open lease, 0 without one."""

    open: int
    oldest_s: float


class LeaseTable:
    """Each handle id is opened once and ends once: by `release` or by `expire`."""

    def __init__(self) -> None:
        self._open: dict[str, Lease] = {}
        # (expiry, handle id); entries of ended leases are dropped when they come to the top.
        self._by_expiry: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Open leases."""
        return len(self._open)

    def open(self, handle_id: str, descriptor: KvDescriptor, now: float, lease_s: float) -> None:
        """Raises ValueError for an id that is open."""
        if handle_id in self._open:
            raise ValueError(f"lease {handle_id} is open")
        lease = Lease(handle_id, descriptor, now, now + lease_s)
        self._open[handle_id] = lease
        heappush(self._by_expiry, (lease.expiry, handle_id))

    def release(self, handle_id: str) -> Lease | None:
        """Ends a lease and returns it; None for one that is unknown or ended."""
        return self._open.pop(handle_id, None)

    def expire(self, now: float) -> list[Lease]:
        """Ends the leases whose time is over and returns them, the earliest first."""
        ended: list[Lease] = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            ended.append(self._open.pop(heappop(self._by_expiry)[1]))
        return ended

    def next_expiry(self) -> float | None:
        """When `expire` has something to do; None without open leases."""
        while self._by_expiry and self._by_expiry[0][1] not in self._open:
            heappop(self._by_expiry)
        return self._by_expiry[0][0] if self._by_expiry else None

    def snapshot(self, now: float) -> LeaseSnapshot:
        oldest = min((lease.opened for lease in self._open.values()), default=now)
        return LeaseSnapshot(len(self._open), now - oldest)
