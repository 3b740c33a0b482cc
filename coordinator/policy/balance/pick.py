"""What a balance policy is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.policy.snapshot import WorkerView


@dataclass(frozen=True, slots=True)
class Need:
    """What a policy may go by, beside the workers' load.

    `cost` forecasts what the request costs on a worker, in shares of the latency targets;
    `cached_tokens` are those of its prompt that workers are believed to hold, by id; `turn`
    counts decisions, to take turns and in place of chance.
    """

    cost: Callable[[WorkerView], float]
    cached_tokens: Mapping[str, int]
    turn: int


Pick = Callable[[Sequence[WorkerView], Need], WorkerView]
"""Takes one of the workers, of which there is at least one."""
