from __future__ import annotations

from collections.abc import Sequence

from coordinator.policy.balance.pick import Need
from coordinator.policy.snapshot import WorkerView


def round_robin(views: Sequence[WorkerView], need: Need) -> WorkerView:
    """Each in its turn, whatever it has to do."""
    return views[need.turn % len(views)]
