from __future__ import annotations

from collections.abc import Sequence

from coordinator.policy.balance.pick import Need
from coordinator.policy.snapshot import WorkerView


def least_outstanding(views: Sequence[WorkerView], need: Need) -> WorkerView:
    """The fewest prompt tokens to read, then the fewest sequences; equals take turns."""
    turn, count = need.turn, len(views)
    return min(
        enumerate(views),
        key=lambda item: (
            item[1].outstanding_tokens,
            item[1].outstanding_sequences,
            (item[0] - turn) % count,
        ),
    )[1]
