"""What an experiment saw, as a coordinator tells it at `/experiments`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.types import Mode

Quantiles = tuple[float, float, float]
"""50th, 90th and 99th percentile."""


def quantiles(seconds: npt.ArrayLike) -> Quantiles | None:
    """None of nothing."""
    values = np.asarray(seconds, dtype=np.float64)
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return float(p50), float(p90), float(p99)


@dataclass(frozen=True, slots=True)
class Arm:
    """`gpus` are those that it can use, and `hour` is what all of them cost an hour, 0 where no
    price is known; `stopped` says in words why it gets no traffic any more."""

    name: str
    mode: Mode
    gpus: float
    stopped: str = ""
    hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Slot:
    """What came of the requests that arrived for one arm in `seconds` of a block.

    `good` of those `asked` met the targets, with so many tokens, prompt and answer. Quantiles in
    seconds; None where there was no token, or none after a first one.
    """

    block: int
    arm: str
    asked: int
    good: int
    good_tokens: int
    seconds: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None


@dataclass(frozen=True, slots=True)
class Experiment:
    """The first arm is the one that the others are compared with. `assignment` is sticky,
    interleaved, paired or shadow."""

    name: str
    model: str
    assignment: str
    arms: Sequence[Arm]
    slots: Sequence[Slot]
    equal_weights: bool = True


def experiment(told: Mapping[str, Any]) -> Experiment:
    """From the JSON of a coordinator. Raises KeyError or ValueError for anything else."""
    weights = {arm["weight"] for arm in told["arms"]}
    return Experiment(
        name=told["name"],
        model=told["model"],
        assignment=told["assignment"],
        arms=[
            # One that no worker was ever there for is compared as if it had one.
            Arm(arm["name"], Mode(arm["mode"]), max(1, arm["gpus"]), arm["stopped"], arm["hour"])
            for arm in told["arms"]
        ],
        slots=[
            Slot(**{**slot, "ttft_s": _three(slot["ttft_s"]), "itl_s": _three(slot["itl_s"])})
            for slot in told["slots"]
        ],
        equal_weights=len(weights) == 1,
    )


def _three(values: Sequence[float] | None) -> Quantiles | None:
    if values is None:
        return None
    p50, p90, p99 = values
    return p50, p90, p99
