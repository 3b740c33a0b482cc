"""What admission decides about, and by: a request on its way, and what the fleet can take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from coordinator.policy.fair_queue import Place
from pdserve.types import Role


class Priority(StrEnum):
    """Who goes first where some must wait."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def weight(self) -> float:
        """Its part of what is read while others wait: even the lowest is never starved."""
        return _WEIGHTS[self]


_WEIGHTS = {Priority.HIGH: 16.0, Priority.NORMAL: 4.0, Priority.LOW: 1.0}


def lower(one: Priority, other: Priority) -> Priority:
    return min(one, other, key=lambda priority: priority.weight)


def priority_of(number: int) -> Priority:
    """The class of a request's `priority`, which is the lower the sooner, as in vLLM."""
    if number == 0:
        return Priority.NORMAL
    return Priority.HIGH if number < 0 else Priority.LOW


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_running` of None leaves it to what the fleet holds. `max_ttft_s` is how long it may be
    predicted to take to the first token of a request without a deadline."""

    max_running: int | None
    max_queued: int
    max_ttft_s: float


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that read prompts, and all together the prompt tokens that they read in a step,
    and are expected to read in a second that they do nothing else; 0 where that is unknown.
    `piled_tokens` are those that some of them have to read beyond their own part of the window:
    they keep nothing from the others."""

    workers: int = 0
    chunk_tokens: int = 0
    tokens_per_s: float = 0.0
    piled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ready workers of a model can take: sequences in all, and tokens of KV that are
    free now, on those that decode; and by role those that read prompts. Nobody waits for a
    fleet that can take no sequence."""

    sequences: int = 0
    free_kv_tokens: int = 0
    pools: Mapping[Role, Pool] = field(default_factory=dict)

    def pool(self, role: Role) -> Pool:
        return self.pools.get(role, _NO_POOL)


_NO_POOL = Pool()


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request when it comes; times in seconds, on the clock of `now`.

    `weight` is its part beside other tenants, `prompt_chars` how long the prompt is before it
    is tokenised.
    """

    tenant: str
    priority: Priority
    weight: float
    arrived: float
    deadline: float | None = None
    prompt_chars: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What it asks for, known once it is tokenised.

    `reader` is the pool that is to read the prompt, as far as can be told before its turn.
    `own_s` is how long its first token is expected to take from its turn on, beside `behind_s`,
    for which it is to wait behind others on its worker.
    """

    prompt_tokens: int
    max_tokens: int
    reader: Role
    own_s: float = 0.0
    behind_s: float = 0.0


class State(Enum):
    ARRIVED = "arrived"
    QUEUED = "queued"
    READING = "reading"
    WRITING = "writing"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from its arrival until it leaves; changed by `AdmissionQueue` alone.

    `latest` is when its turn must come for it to be in time, `began` when its first token came.
    Places and counts are kept here so that whatever was taken is what is given back.
    """

    asked: Asked
    state: State = State.ARRIVED
    work: Work = field(default=Work(0, 0, Role.DECODE))
    queued: float = 0.0
    admitted: float = 0.0
    began: float = 0.0
    latest: float = math.inf
    kv_tokens: int = 0
    window_tokens: int = 0
    place: Place[Ticket] | None = None
