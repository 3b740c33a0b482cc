from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from coordinator.policy.balance.pick import Need
from coordinator.policy.snapshot import WorkerView


def power_of_two(views: Sequence[WorkerView], need: Need) -> WorkerView:
    """The one of two workers with less to do; chance names the two, drawn from the turn.

    Mitzenmacher: The Power of Two Choices in Randomized Load Balancing, 1996. It needs no fresh
    picture of all: many coordinators do not all run to the same worker.
    """
    if len(views) == 1:
        return views[0]
    drawn = xxh3_64_intdigest(need.turn.to_bytes(8, "little"))
    first = drawn % len(views)
    second = (first + 1 + (drawn >> 32) % (len(views) - 1)) % len(views)
    return min(
        views[first],
        views[second],
        key=lambda view: (view.outstanding_tokens, view.outstanding_sequences),
    )
