"""A plan on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from measure.plan.levers import Lever
    from measure.plan.sizing import Fleet, Sizing


def picture(
    sizing: Sizing,
    levers: Sequence[Lever],
    asked: tuple[float, float, str],
    budget: float | None,
) -> Group:
    """`asked` are the rate in requests a second, the headroom, and a GPU's price in words;
    `budget` is in dollars an hour."""
    rate, headroom, price = asked
    parts: list[RenderableType] = [
        f"{rate:.3g} requests a second ({rate * 60:,.0f} a minute), {headroom:.0%} of headroom",
        price,
        _fleets(sizing),
        Text(_verdict(sizing, budget), "bold"),
    ]
    if levers:
        parts.append(_levers(levers, sizing))
    return Group(*parts)


def _fleets(sizing: Sizing) -> Table:
    """A column for each way of serving."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in sizing.fleets:
        table.add_column(name, justify="right")
    for name, figure in _FIGURES.items():
        table.add_row(
            name, *("-" if fleet is None else figure(fleet) for fleet in sizing.fleets.values())
        )
    return table


def _workers(fleet: Fleet) -> str:
    if fleet.prefill:
        return f"{fleet.prefill} prefill : {fleet.decode} decode"
    return str(fleet.decode)


def _several(number: int, word: str) -> str:
    return word if number == 1 else f"{word}s"


def _tokens_cost(fleet: Fleet) -> str:
    million = fleet.cost.million_tokens
    return "not known" if million is None else f"{million:.3f}"


_FIGURES: dict[str, Callable[[Fleet], str]] = {
    "workers": _workers,
    "GPUs a worker": lambda fleet: str(fleet.tensor_parallel),
    "weights": lambda fleet: fleet.precision or "as measured",
    "GPUs": lambda fleet: str(fleet.gpus),
    "serves at most": lambda fleet: f"{fleet.saturation:.3g}/s",
    "bound by": lambda fleet: fleet.constraint or "not known",
    "$ an hour": lambda fleet: f"{fleet.cost.hour:,.2f}",
    "$ a million tokens": _tokens_cost,
    "$ a thousand requests": lambda fleet: f"{fleet.cost.request * 1000:.3f}",
}


def _verdict(sizing: Sizing, budget: float | None) -> str:
    best = sizing.cheapest
    if best is None:
        return "Nothing that was tried serves this."
    fleet = sizing.fleets[best]
    assert fleet is not None
    workers = fleet.prefill + fleet.decode
    words = f"{best}: {_workers(fleet)} {_several(workers, 'worker')}"
    words += f", {fleet.gpus} {_several(fleet.gpus, 'GPU')}"
    if sizing.margin:
        words += f"; {sizing.margin:.0%} cheaper than the next"
    elif sizing.margin is not None:
        words += "; another costs as much"
    if budget is not None and fleet.cost.hour > budget:
        words += f"; over the budget of ${budget:,.2f} an hour"
    return words


def _levers(levers: Sequence[Lever], sizing: Sizing) -> Table:
    best = sizing.fleets[sizing.cheapest] if sizing.cheapest else None
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("to be cheaper")
    for name in ("GPUs", "$/hour", "saves"):
        table.add_column(name, justify="right")
    for lever in levers:
        if lever.fleet is None:
            table.add_row(lever.name, "", "does not serve it", "")
            continue
        hour = lever.fleet.cost.hour
        saved = f"{1 - hour / best.cost.hour:.0%}" if best is not None else ""
        table.add_row(lever.name, str(lever.fleet.gpus), f"{hour:,.2f}", saved)
    return table
