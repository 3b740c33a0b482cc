"""What would make a plan cheaper, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from measure.plan.fleet import Traffic
from measure.plan.sizing import Asked, Fleet, Report, cheapest
from measure.plan.slo import Slo
from measure.simulation.roofline import MODELS, Precision
from pdserve.types import Mode

LOOSER = 2.0
"""Times as much as the SLO allows."""
CACHED = 0.5
"""Part of each prompt, as a long system prompt or the turns before would be."""


@dataclass(frozen=True, slots=True)
class Lever:
    """`fleet` is what it takes then; None where that would not do either."""

    name: str
    fleet: Fleet | None


def levers(traffic: Traffic, asked: Asked, mode: Mode, report: Report) -> list[Lever]:
    """Each by itself, served in one mode: a smaller model, stronger quantisation, a looser SLO,
    more of the prompts cached. Left out is what there is none of."""
    found = []
    for name, changed, traffic_then in _changes(traffic, asked):
        report(name)
        found.append(Lever(name, cheapest(traffic_then, changed, mode, report)))
    return found


def _changes(traffic: Traffic, asked: Asked) -> Iterator[tuple[str, Asked, Traffic]]:
    smaller = {name: it for name, it in MODELS.items() if it.parameters < asked.model.parameters}
    if smaller:
        name = max(smaller, key=lambda it: smaller[it].parameters)
        yield f"smaller model: {name}", replace(asked, model=smaller[name]), traffic
    if Precision.FP8 not in asked.precisions:
        yield "weights in FP8", replace(asked, precisions=(Precision.FP8,)), traffic
    looser = Slo(asked.slo.ttft_p99_s * LOOSER, asked.slo.itl_p99_s * LOOSER)
    yield f"SLO {LOOSER:g} times as loose", replace(asked, slo=looser), traffic
    if traffic.cached < CACHED:
        cached = Traffic(traffic.arrivals, CACHED)
        yield f"{CACHED:.0%} of each prompt found in the prefix cache", asked, cached
