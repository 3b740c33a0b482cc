"""What the slots of an experiment say: differences with their intervals, and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import median

from pdserve.ab.evidence import Interval, interval, times_as_many
from pdserve.ab.slots import Arm, Experiment, Slot
from pdserve.types import Mode

ALPHA = 0.05
"""Probability of a false verdict of an experiment, however often and long it is looked at."""

Pair = tuple[Slot, Slot]
"""The slots of one block: of the first arm, and of another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both arms, in `unit`. `change` is a difference in parts of one: absolute for
    the attainment, which is a part of one itself, else relative to the first arm."""

    name: str
    unit: str
    first: float | None
    other: float | None
    change: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm beside the first one, over so many whole blocks. The verdict is made by the row
    `goodput` alone: the others are shown, each with an interval of its own."""

    first: Arm
    other: Arm
    blocks: int
    requests: int
    goodput: Row
    verdict: str
    rows: Sequence[Row] = ()


def compare(experiment: Experiment, gpu_hour: float | None) -> list[Comparison]:
    """Each arm with the first. `gpu_hour` is the price of a GPU for an hour; None: what the arms'
    own GPUs cost, and where that is not known, costs are hours of GPUs."""
    found = []
    for one in decide(experiment):
        pairs = _pairs(experiment, one.first, one.other)
        cost = _cost(pairs, (one.first, one.other), gpu_hour)
        found.append(replace(one, rows=[_attainment(pairs), *_latencies(pairs), cost]))
    return found


def decide(experiment: Experiment) -> list[Comparison]:
    """As `compare`, but for the rows that decide nothing: a tenth of the work."""
    first, *others = experiment.arms
    return [_decide(experiment, (first, other)) for other in others]


def _pairs(experiment: Experiment, first: Arm, other: Arm) -> list[Pair]:
    """Blocks in which both had a request, in order."""
    found = {(slot.block, slot.arm): slot for slot in experiment.slots if slot.asked}
    blocks = sorted(block for block, arm in found if arm == first.name)
    return [
        (found[block, first.name], found[block, other.name])
        for block in blocks
        if (block, other.name) in found
    ]


def _decide(experiment: Experiment, arms: tuple[Arm, Arm]) -> Comparison:
    first, other = arms
    pairs = _pairs(experiment, first, other)
    alpha = ALPHA / (len(experiment.arms) - 1)
    differences = [
        _relative(_attained(mine) / first.gpus, _attained(theirs) / other.gpus)
        for mine, theirs in pairs
    ]
    decisive = interval(differences, alpha)
    requests = sum(mine.asked + theirs.asked for mine, theirs in pairs)
    times = times_as_many(differences, alpha) if pairs else inf
    goodput = Row(
        "goodput", "good/s/GPU", _goodput(pairs, 0, first), _goodput(pairs, 1, other),
        _as_ratio(decisive),
    )  # fmt: skip
    verdict = _verdict(experiment, arms, decisive, (requests, times))
    return Comparison(first, other, len(pairs), requests, goodput, verdict)


def _verdict(
    experiment: Experiment, arms: tuple[Arm, Arm], decisive: Interval, seen: tuple[int, float]
) -> str:
    first, other = arms
    stopped = next((arm.stopped for arm in arms if arm.stopped), "")
    if experiment.assignment == "shadow":
        words = "no verdict: copies share the fleet with what they are copies of"
    elif not experiment.equal_weights:
        words = "no verdict: arms of unequal weight are not compared block by block"
    elif decisive.low > 0:
        words = _take(first, other)
    elif decisive.high < 0:
        words = _keep(first)
    elif stopped:
        words = "not known"
    else:
        words = f"not yet known, {_more(*seen)}"
    # A guard rail looks at few requests of one moment: it spares users, and proves nothing.
    return f"{words}; stopped: {stopped}" if stopped else words


def _keep(first: Arm) -> str:
    return f"stay {first.mode}" if first.mode is Mode.COLOCATED else f"keep {first.name}"


def _take(first: Arm, other: Arm) -> str:
    if other.mode is first.mode:
        return f"take {other.name}"
    words = {
        Mode.DISAGGREGATED: "disaggregate",
        Mode.AUTO: "choose request by request (auto)",
        Mode.COLOCATED: "serve colocated",
    }
    return words[other.mode]


def _more(requests: int, times: float) -> str:
    """How many requests more would decide it, if they are like those so far."""
    if not requests:
        return "for no block is complete"
    if not isfinite(times) or times > 1000:
        return "and no difference in sight"
    number = max(1.0, (times - 1) * requests)
    digits = 10 ** max(0, len(str(int(number))) - 2)
    return f"about {round(number / digits) * digits:,.0f} more requests"


def _attained(slot: Slot) -> float:
    return slot.good / slot.asked


def _attainment(pairs: Sequence[Pair]) -> Row:
    shares = [
        _over(sum(pair[side].good for pair in pairs), sum(pair[side].asked for pair in pairs))
        for side in (0, 1)
    ]
    change = interval([_attained(theirs) - _attained(mine) for mine, theirs in pairs], ALPHA)
    first, other = (_times(share, 100) for share in shares)
    return Row("SLO attainment", "%", first, other, change)


def _goodput(pairs: Sequence[Pair], side: int, arm: Arm) -> float | None:
    """At the load that both had: the arm that by chance was asked more did not serve more."""
    asked = sum(mine.asked + theirs.asked for mine, theirs in pairs)
    seconds = sum(mine.seconds + theirs.seconds for mine, theirs in pairs)
    attained = _over(
        sum(pair[side].good for pair in pairs), sum(pair[side].asked for pair in pairs)
    )
    rate = _over(asked, seconds)
    return None if attained is None or rate is None else attained * rate / arm.gpus


def _latencies(pairs: Sequence[Pair]) -> list[Row]:
    rows = []
    for name, unit, factor, field in (
        ("TTFT", "s", 1.0, "ttft_s"),
        ("ITL", "ms", 1000.0, "itl_s"),
    ):
        for place, percent in enumerate(("p50", "p90", "p99")):

            def value(slot: Slot, field: str = field, place: int = place) -> float | None:
                quantiles = getattr(slot, field)
                return None if quantiles is None else float(quantiles[place])

            rows.append(_latency(pairs, f"{name} {percent}", (unit, factor), value))
    return rows


def _latency(
    pairs: Sequence[Pair],
    name: str,
    scale: tuple[str, float],
    value: Callable[[Slot], float | None],
) -> Row:
    """Each slot's quantile is its observation: the shown one is the median of them."""
    both = [
        (mine, theirs)
        for mine, theirs in ((value(mine), value(theirs)) for mine, theirs in pairs)
        if mine is not None and theirs is not None
    ]
    unit, factor = scale
    change = interval([_relative(mine, theirs) for mine, theirs in both], ALPHA)
    shown = [median(side) * factor for side in zip(*both, strict=True)] or [None, None]
    return Row(name, unit, shown[0], shown[1], _as_ratio(change))


def _cost(pairs: Sequence[Pair], arms: tuple[Arm, Arm], gpu_hour: float | None) -> Row:
    """Of a million tokens, prompts and answers, in answers that met the targets."""
    unit = "per million good tokens"
    if gpu_hour is not None:
        hours = [arm.gpus * gpu_hour for arm in arms]
    elif all(arm.hour for arm in arms):
        hours = [arm.hour for arm in arms]
    else:
        hours, unit = [arm.gpus for arm in arms], f"GPU hours {unit}"
    # Fewer tokens for the money are a higher cost; none at all still are a number.
    change = interval(
        [
            -_relative(*(
                slot.good_tokens / (slot.seconds * (hour or 1.0))
                for slot, hour in zip(pair, hours, strict=True)
            ))
            for pair in pairs
        ],
        ALPHA,
    )  # fmt: skip
    shown = [
        _times(
            _over(
                sum(pair[side].seconds for pair in pairs),
                sum(pair[side].good_tokens for pair in pairs),
            ),
            hour / 3600 * 1e6,
        )
        for side, hour in enumerate(hours)
    ]
    return Row("cost", unit, shown[0], shown[1], _as_ratio(change))


def _relative(first: float, other: float) -> float:
    """The difference in parts of the sum: from -1 to 1, and turned when the arms are."""
    return (other - first) / (other + first) if other + first else 0.0


def _as_ratio(change: Interval) -> Interval:
    """Parts of the sum as parts of the first."""
    return Interval(*(2 * part / (1 - part) if part < 1 else inf for part in _parts(change)))


def _parts(change: Interval) -> tuple[float, float, float]:
    return change.low, change.middle, change.high


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
