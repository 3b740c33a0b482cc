"""What workers that host both services do now: read prompts, write answers, or both. Pure.

The pools' pressure in, at most one move out. Two thresholds and a dwell time keep a worker from
going to and fro: a pool asks for help when it is above what its configuration calls full, and
gives only while it is below half of that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve.types import Role


class Duty(StrEnum):
    PREFILL = "prefill"
    """It reads prompts for others, and nothing else."""
    DECODE = "decode"
    """It writes answers, also of prompts that it reads itself."""
    COLOCATED = "colocated"
    """It does both, as workers do that are not elastic."""


def duty_of(roles: Collection[Role]) -> Duty:
    """What a worker begins with: all that it hosts."""
    if Role.DECODE not in roles:
        return Duty.PREFILL
    return Duty.COLOCATED if Role.PREFILL in roles else Duty.DECODE


@dataclass(frozen=True, slots=True)
class DutyPolicy:
    """`prefill_tokens` that wait to be read, and `sequences` that are written, for each worker of
    a pool, fill it. No worker moves within `dwell_s` of the last move of its model."""

    prefill_tokens: int
    sequences: int
    dwell_s: float


@dataclass(frozen=True, slots=True)
class OnDuty:
    """A worker as far as it matters here. `may_move` where it hosts both services; `tokens` are
    to be read there, `sequences` are being written."""

    worker_id: str
    duty: Duty
    may_move: bool
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Move:
    """`reason` is in words, for the operator."""

    worker_id: str
    duty: Duty
    reason: str


_LOW = 0.5


def move(
    workers: Sequence[OnDuty], policy: DutyPolicy, last_move: float, now: float
) -> Move | None:
    """The next move, if any. `workers` are those of one model that may be given work.

    Where none is left that writes, or reads for others, whoever may do so does, at once.
    """
    for missing, other in (("writes", Duty.PREFILL), ("reads", Duty.DECODE)):
        if all(worker.duty is other for worker in workers) and (worker := _idlest(workers, other)):
            return Move(worker.worker_id, Duty.COLOCATED, f"nobody else {missing}")
    if now - last_move < policy.dwell_s:
        return None
    prefill, decode = pressures(workers, policy)
    words = f"prefill {prefill:.0%} full, decode {decode:.0%}"
    if prefill > 1 and decode < _LOW:
        return _towards(Duty.PREFILL, workers, f"prompts wait: {words}")
    if decode > 1 and prefill < _LOW:
        return _towards(Duty.DECODE, workers, f"answers crowd: {words}")
    worker = _idlest(workers, Duty.PREFILL, Duty.DECODE)
    if prefill < _LOW and decode < _LOW and worker is not None:
        return Move(worker.worker_id, Duty.COLOCATED, f"both have room: {words}")
    return None


def pressures(workers: Sequence[OnDuty], policy: DutyPolicy) -> tuple[float, float]:
    """How full the prefill and the decode pool are: 1 is full, and work without a pool is
    twice that."""
    readers = sum(worker.duty is not Duty.DECODE for worker in workers)
    writers = sum(worker.duty is not Duty.PREFILL for worker in workers)
    tokens = sum(worker.tokens for worker in workers)
    sequences = sum(worker.sequences for worker in workers)
    return (
        _full(tokens, readers * policy.prefill_tokens),
        _full(sequences, writers * policy.sequences),
    )


def _full(work: int, capacity: int) -> float:
    if capacity:
        return work / capacity
    return 2.0 if work else 0.0


def _towards(wanted: Duty, workers: Sequence[OnDuty], reason: str) -> Move | None:
    """One step: whoever is tied to the other duty is set free first."""
    other = Duty.DECODE if wanted is Duty.PREFILL else Duty.PREFILL
    if (worker := _idlest(workers, other)) is not None:
        return Move(worker.worker_id, Duty.COLOCATED, reason)
    # Somebody must stay who does the other.
    others = sum(worker.duty is not wanted for worker in workers)
    if others > 1 and (worker := _idlest(workers, Duty.COLOCATED)) is not None:
        return Move(worker.worker_id, wanted, reason)
    return None


def _idlest(workers: Sequence[OnDuty], *duties: Duty) -> OnDuty | None:
    """Of those on such duty that may move, the one with the least to do."""
    return min(
        (worker for worker in workers if worker.may_move and worker.duty in duties),
        key=lambda worker: (
            worker.sequences,
            worker.tokens,
            worker.worker_id,
        ),
        default=None,
    )
