"""Which arm of an experiment a request belongs to: a stable function of its key."""

from __future__ import annotations

from itertools import accumulate

from xxhash import xxh3_64_intdigest

from coordinator.policy.snapshot import ArmPolicy

_SPACE = 2**64


def assign(experiment: str, arms: tuple[ArmPolicy, ...], key: str) -> ArmPolicy:
    """The same key always meets the same arm; keys spread over arms by weight.

    The experiment's name salts the hash, so that two experiments split differently.
    """
    total = sum(arm.weight for arm in arms)
    point = xxh3_64_intdigest(f"{experiment}\0{key}".encode()) / _SPACE * total
    bounds = accumulate(arm.weight for arm in arms)
    # Rounding may leave the last point on the far bound, never on an arm of weight 0.
    last = max(i for i, arm in enumerate(arms) if arm.weight)
    return next((arm for arm, bound in zip(arms, bounds, strict=True) if point < bound), arms[last])
