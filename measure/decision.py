"""What a decision costs the coordinator: `python -m measure.decision`.

In a fleet whose every worker has something to read and answers to write, and every pair of which
is proven: `choose` is to find a route for prompts of all lengths.
"""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimates, HandOver, Timings
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot, WorkerView
from measure.page import Row, table
from pdserve.types import Mode

WORKERS = 200
"""In each of the two pools."""
DECISIONS = 2_000
LEARNT = Timings(reads_learnt=True, writes_learnt=True)
AUTO = ModelPolicy(Mode.AUTO, decider="estimate")
POLICIES = {
    "`auto`, `estimate`, `prefix-aware`": AUTO,
    "`auto`, `threshold`, `prefix-aware`": replace(AUTO, decider="threshold"),
    "colocated, `prefix-aware`": replace(AUTO, mode=Mode.COLOCATED),
    "disaggregated, `round-robin`": replace(
        AUTO, mode=Mode.DISAGGREGATED, prefill_balance="round-robin", decode_balance="round-robin"
    ),
}


def _view(name: str, random: Random, *, writes: bool) -> WorkerView:
    writing = random.randrange(20, 60) if writes else 0
    return WorkerView(
        name,
        outstanding_sequences=writing,
        outstanding_tokens=random.randrange(1, 10_000),
        outstanding_pairs=random.randrange(1, 10**8),
        outstanding_prompts=random.randrange(1, 5),
        writing=writing,
        context_tokens=500.0 * writing,
        capacity_tokens=400_000,
    )


def _microseconds(policy: ModelPolicy) -> float:
    """CPU time of one decision."""
    random = Random(1)
    prefill = tuple(_view(f"p{number}", random, writes=False) for number in range(WORKERS))
    decode = tuple(_view(f"d{number}", random, writes=True) for number in range(WORKERS))
    pairs = {(p.worker_id, d.worker_id): ("grpc",) for p in prefill for d in decode}
    estimates = Estimates({"": LEARNT}, HandOver(learnt=True))
    snapshots = [
        Snapshot(prefill, decode, pairs, turn, estimates, now=1.0) for turn in range(DECISIONS)
    ]
    facts = [RequestFacts(random.randrange(1, 10_000)) for _ in range(DECISIONS)]
    begun = time.process_time()
    for snapshot, each in zip(snapshots, facts, strict=True):
        choose(snapshot, policy, each)
    return (time.process_time() - begun) / DECISIONS * 1e6


def main() -> None:
    rows: list[Row] = [(name, f"{_microseconds(policy):.0f}") for name, policy in POLICIES.items()]
    print(table((f"{WORKERS} workers that read, {WORKERS} that write", "µs a decision"), rows))


if __name__ == "__main__":
    main()
