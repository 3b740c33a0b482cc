"""Experiments on a made-up server, thousands at a time, where the truth is known. Pure.

Requests come as a Poisson process to one queue with exponential service (M/M/1), so that a bad
moment of it is shared by all who wait then; a request is good when it was served within a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from pdserve.ab.evidence import Array, evidence_after_each


@dataclass(frozen=True, slots=True)
class Made:
    """What `runs` experiments of `blocks` blocks each are made of.

    `load` is of the server, `per_slot` the mean number of requests in a slot, `target` in mean
    service times. Arm B loses `worse` of its good answers. `together` has both arms in every slot,
    each request in one of them by the toss of a coin; else the arms' slots alternate in random
    order.
    """

    runs: int
    blocks: int
    load: float = 0.9
    per_slot: int = 150
    target: float = 15.0
    worse: float = 0.0
    together: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Requests and good ones; axes: run, block, arm."""

    asked: Array
    good: Array


def play(made: Made, seed: int) -> Outcome:
    """The same for the same seed."""
    dice = np.random.default_rng(seed)
    slots = made.blocks * (1 if made.together else 2)
    count = int(slots * made.per_slot * 1.2) + 200
    gaps = dice.exponential(1 / made.load, (made.runs, count))
    service = dice.exponential(1.0, (made.runs, count))
    # Lindley: what waits at each arrival is the walk of service minus gaps above its lowest point.
    walk = np.cumsum(service - gaps, axis=1) - service
    taken = walk - np.minimum.accumulate(walk, axis=1) + service
    good = taken <= made.target
    slot = np.floor(np.cumsum(gaps, axis=1) * made.load / made.per_slot).astype(int)
    if made.together:
        block, arm = slot, dice.integers(0, 2, taken.shape)
    else:
        block = slot // 2
        first = dice.integers(0, 2, (made.runs, made.blocks + count))
        arm = (slot + np.take_along_axis(first, block, axis=1)) % 2
    good &= (arm == 0) | (dice.random(taken.shape) >= made.worse)
    return _counted(made, block, arm, good)


def _counted(made: Made, block: Array, arm: Array, good: Array) -> Outcome:
    inside = block < made.blocks
    run = np.broadcast_to(np.arange(made.runs)[:, None], block.shape)
    place = ((run * made.blocks + block) * 2 + arm)[inside]
    shape = (made.runs, made.blocks, 2)
    size = made.runs * made.blocks * 2
    asked = np.bincount(place, minlength=size).reshape(shape).astype(float)
    fine = np.bincount(place, weights=good[inside], minlength=size).reshape(shape)
    return Outcome(asked, fine.astype(float))


def differences(outcome: Outcome) -> Array:
    """Of the attainment, by run and block; 0 where an arm of a block had no request."""
    attained = outcome.good / np.maximum(outcome.asked, 1)
    both = (outcome.asked > 0).all(axis=2)
    return np.where(both, attained[..., 1] - attained[..., 0], 0.0)


def decided_by_blocks(outcome: Outcome, alpha: float) -> Array:
    """After how many blocks each run was decided; infinite where never. Looks after each."""
    values = differences(outcome)
    bar = log(2 / alpha)
    return _first((evidence_after_each(values) >= bar) | (evidence_after_each(-values) >= bar))


def decided_by_requests(outcome: Outcome, alpha: float) -> Array:
    """The same with each request as a unit, as if none knew of another, and from a tenth of the
    blocks on, for before that no spread is known: the always-valid normal mixture of Waudby-Smith,
    Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
    sequences", Annals of Statistics 52(6), 2024, theorem 2.2, tuned to where it is narrowest after
    a tenth of the requests."""
    asked, good = outcome.asked.cumsum(axis=1), outcome.good.cumsum(axis=1)
    rate = good / np.maximum(asked, 1)
    spread = (rate * (1 - rate) / np.maximum(asked, 1)).sum(axis=2)
    number = asked.sum(axis=2)
    tuned = number[:, -1:] / 10
    scale = (2 * log(1 / alpha) + log(1 + 2 * log(1 / alpha))) / tuned
    grown = number * scale + 1
    width = np.sqrt(spread * 2 * grown / (number * scale) * np.log(np.sqrt(grown) / alpha))
    return _first((np.abs(rate[..., 1] - rate[..., 0]) > width) & (number >= tuned))


def decided_by_peeking(outcome: Outcome, least: int = 10) -> Array:
    """The same with blocks as units, but by the 95 % interval of a fixed number of blocks, from
    the `least`th on looked at after each."""
    values = differences(outcome)
    number = np.arange(1, values.shape[1] + 1)
    mean = values.cumsum(axis=1) / number
    square = (values**2).cumsum(axis=1) / number
    error = np.sqrt(np.maximum(square - mean**2, 0) / np.maximum(number - 1, 1))
    return _first((np.abs(mean) > 1.96 * error) & (number >= least))


def _first(decided: npt.NDArray[np.bool_]) -> Array:
    return np.where(decided.any(axis=1), decided.argmax(axis=1) + 1.0, np.inf)
