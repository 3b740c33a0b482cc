"""Which arm of an experiment a request belongs to, by its key and the time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from pdserve.config_experiment import Arm, Experiment

_SPACE = 2**64


class Weighted(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...


W = TypeVar("W", bound=Weighted)


class Place(NamedTuple):
    """`slot` is the time slot since the start, `block` what it is compared in; `counts` says
    whether the slot's washout is over."""

    slot: int
    block: int
    arm: str
    counts: bool


def place(
    experiment: Experiment, seed: int, elapsed_s: float, key: str, stopped: Collection[str]
) -> Place:
    """Of a request with this key that arrives so long after the start.

    Every block is drawn anew: sticky arms are kept by a key for one slot, interleaved ones take
    their turns in an order of chance. Arms that were `stopped` leave theirs to the others.
    """
    slot, at_s = divmod(elapsed_s, experiment.slot_s)
    block, counts = int(slot), at_s >= experiment.washout_s
    going = [arm for arm in experiment.arms if arm.name not in stopped]
    if experiment.assignment == "sticky":
        arm = assign(f"{experiment.name}\0{seed}\0{block}", going, key)
    elif experiment.assignment == "shadow":
        arm = experiment.arms[0]
    else:
        block, turn = divmod(block, len(experiment.arms))
        arm = order(experiment.arms, seed, block)[turn]
        if arm not in going:
            arm, counts = going[0], False
    return Place(int(slot), block, arm.name, counts)


def order(arms: Sequence[Arm], seed: int, block: int) -> list[Arm]:
    """In which the arms take their turns in a block."""
    return Random(f"{seed} {block}").sample(arms, len(arms))


def assign(salt: str, arms: Sequence[W], key: str) -> W:
    """The same key always meets the same arm; keys spread over arms by weight.

    The salt goes into the hash, so that two experiments split differently.
    """
    total = sum(arm.weight for arm in arms)
    point = xxh3_64_intdigest(f"{salt}\0{key}".encode()) / _SPACE * total
    bounds = accumulate(arm.weight for arm in arms)
    # Rounding may leave the last point on the far bound, never on an arm of weight 0.
    last = max(i for i, arm in enumerate(arms) if arm.weight)
    return next((arm for arm, bound in zip(arms, bounds, strict=True) if point < bound), arms[last])
