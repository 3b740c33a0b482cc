"""A report as Markdown, for a terminal and for a page. Pure."""

from __future__ import annotations

from collections.abc import Callable

from measure.page import table
from pdserve.ab.evidence import Interval
from pdserve.ab.report import ALPHA, Comparison, Row
from pdserve.ab.slots import Experiment

_MANY = 10.0
"""A change that is shown as a factor."""
_MOST = 1000.0
"""Where a factor says nothing any more: one of the arms did next to nothing."""


def render(experiment: Experiment, comparisons: list[Comparison]) -> str:
    parts = []
    for one in comparisons:
        parts += [
            f"**{one.first.name} or {one.other.name}: {one.verdict}**",
            f"{_several(one.blocks, 'block')}, {_several(one.requests, 'request')}; "
            f"{_capacity(one)}",
            _table(one),
        ]
    parts.append(
        f"The verdict is made by goodput alone, and is false with a probability of {ALPHA:.0%} at "
        "most, however often it is looked at. Each other interval is one of 95 % by itself."
        + (
            " Requests of both arms share the queues of one fleet, which hides a part of what they "
            "differ by."
            if experiment.assignment in ("sticky", "shadow")
            else ""
        )
    )
    return "\n\n".join(parts)


def _several(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _capacity(one: Comparison) -> str:
    first, other = one.first, one.other
    if first.gpus == other.gpus:
        return f"equal capacity: {first.gpus:g} GPUs (or workers) each"
    return (
        f"normalised per GPU (or worker): {first.name} can use {first.gpus:g}, "
        f"{other.name} {other.gpus:g}"
    )


def _table(one: Comparison) -> str:
    rows = [
        (
            f"{row.name}, {row.unit}",
            _number(row.first),
            _number(row.other),
            *_change(row, absolute=row.name == "SLO attainment"),
        )
        for row in (one.goodput, *one.rows)
    ]
    return table(("", one.first.name, one.other.name, "difference", "interval"), rows)


def _change(row: Row, *, absolute: bool) -> tuple[str, str]:
    if row.first is None or row.other is None:
        return "-", "-"
    tell = _points if absolute else _percent
    return tell(row.change.middle), _bounds(row.change, 1.0 if absolute else _MOST, tell)


def _bounds(change: Interval, most: float, tell: Callable[[float], str]) -> str:
    """From -1 on, all or nothing, and from `most` on, it is none."""
    bounded = change.low > -1, change.high < most
    low, high = tell(change.low), tell(change.high)
    if all(bounded):
        return f"{low} to {high}"
    if any(bounded):
        return f"{low} or more" if bounded[0] else f"{high} or less"
    return "no bound yet"


def _points(part: float) -> str:
    return f"{part * 100:+.1f} points"


def _percent(part: float) -> str:
    if part > _MOST:
        return f"over {_MOST:,.0f} times"
    if part > _MANY:
        return f"{part + 1:,.0f} times"
    return f"{part * 100:+.1f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
