from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from itertools import chain, islice

from coordinator.policy.balance.pick import Need
from coordinator.policy.snapshot import WorkerView

SHORTLIST = 16
"""Workers that are looked at closely; half of them may be there for what they hold."""
CROWDED = 1.5
CROWDED_MORE = 4
"""A worker with more than so many times the mean of sequences, and so many more, is crowded."""


def prefix_aware(views: Sequence[WorkerView], need: Need) -> WorkerView:
    """The least cost: what is left to read of the prompt, the queue before it, and the answers
    that it slows down, all in one measure; equals take turns.

    A hot prefix cannot draw everything to one worker: one that is crowded is not taken
    (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, 2016). Of a large
    pool only those that hold most of the prompt are looked at, and some others in turn.
    """
    listed = _shortlist(views, need)
    limit = CROWDED * sum(view.writing for view in listed) / len(listed) + CROWDED_MORE
    first = need.turn % len(listed)
    roomy = (view for view in (*listed[first:], *listed[:first]) if view.writing <= limit)
    return min(roomy, key=need.cost)


def _shortlist(views: Sequence[WorkerView], need: Need) -> Sequence[WorkerView]:
    if len(views) <= SHORTLIST:
        return views
    cached = need.cached_tokens
    holders = [view for view in views if cached.get(view.worker_id)]
    if len(holders) > SHORTLIST // 2:
        holders = nlargest(SHORTLIST // 2, holders, key=lambda view: cached[view.worker_id])
    others = SHORTLIST - len(holders)
    start = need.turn * others % len(views)
    return [*holders, *islice(chain(islice(views, start, None), views), others)]
