"""What a worker may be given, from what is known of it. Pure.

Whether it answers as it should is a `Standing`, by the same table as that of pairs: failures of
its infrastructure in a row put it into quarantine, and a probe that goes through takes it out.
"""

from __future__ import annotations

from enum import StrEnum

from coordinator.policy.pairs import PairState, Standing


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    """It was never reached."""
    LIVE = "live"
    """Its session is up, and nothing has gone through yet."""
    READY = "ready"
    """A real generation went through this very process."""
    LOADED = "loaded"
    """Ready, and requests wait for its engine."""
    SILENT = "silent"
    """Its load reports are missing: what runs there goes on, nothing new is sent."""
    QUARANTINED = "quarantined"
    """It failed too often in a row, or a probe failed: only probes are sent."""
    DRAINING = "draining"
    """It is to leave: what runs there goes on, nothing new is sent."""
    LOST = "lost"
    """What ran there has been given up."""


SERVING = frozenset({WorkerState.READY, WorkerState.LOADED})
"""The states in which a worker gets work."""

_BY_STANDING = {
    PairState.UNTRIED: WorkerState.LIVE,
    PairState.QUARANTINED: WorkerState.QUARANTINED,
}


def state_of(
    *, reached: bool, connected: bool, silent: bool, leaving: bool, standing: Standing, waiting: int
) -> WorkerState:
    """The first that holds of a worker that was `reached` once or more, is `connected` now,
    `silent` for so long that it is suspected, `leaving` by its own word or its operator's, and
    has so many requests `waiting`."""
    if not connected:
        return WorkerState.LOST if reached else WorkerState.CONNECTING
    if silent:
        return WorkerState.SILENT
    if leaving:
        return WorkerState.DRAINING
    if standing.state is not PairState.PROVEN:
        return _BY_STANDING[standing.state]
    return WorkerState.LOADED if waiting else WorkerState.READY
