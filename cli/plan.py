"""`pdserve plan`"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.failure import CliError
from cli.options import (
    ITL_P99,
    MAX_PRICE,
    TTFT_P99,
    GpuName,
    ItlP99,
    ModelName,
    PrecisionName,
    TtftP99,
)
from cli.traffic import TRAFFIC

if TYPE_CHECKING:
    from measure.plan.fleet import Traffic
    from measure.plan.levers import Lever
    from measure.plan.sizing import Asked, Report, Sizing
    from measure.plan.slo import Slo

_LEAST_REQUESTS = 500
_MOST_REQUESTS = 4_000
_OF_SLO = 10
"""Times the SLO's first token that replayed traffic lasts, so that a queue that grows is seen."""


Rate = Annotated[
    str | None,
    typer.Option(metavar="N/UNIT", help="Like 50/s or 1000/min; default: the trace's own."),
]
Trace = Annotated[
    str | None,
    typer.Option(metavar="FILE|MIX", help=TRAFFIC),
]
Capacity = Annotated[
    str | None, typer.Option(metavar="N/UNIT", help="What one replica serves, where it is known.")
]
Bench = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What `pdserve bench` wrote: measured capacities."),
]
ReplicaGpus = Annotated[
    int, typer.Option(min=1, help="GPUs of what --capacity or --bench was measured on.")
]
Precision = Annotated[
    PrecisionName | None, typer.Option(help="Of weights; default: whichever is cheaper.")
]
Headroom = Annotated[
    float, typer.Option(min=0, max=100, help="So much more than the rate can be served.")
]
GpuPrice = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MAX_PRICE,
        help="Dollars for an hour of one GPU; default: a round figure, see docs/plan.md.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(min=0, help="Dollars an hour; what is dearer is told how to be cheaper."),
]


def plan(  # noqa: PLR0913  (one option each)
    *,
    rate: Rate = None,
    trace: Trace = None,
    ttft_p99: TtftP99 = TTFT_P99,
    itl_p99: ItlP99 = ITL_P99,
    capacity: Capacity = None,
    bench: Bench = None,
    replica_gpus: ReplicaGpus = 1,
    model: Annotated[ModelName, typer.Option(help="What is served.")] = ModelName.LLAMA_70B,
    gpu: Annotated[GpuName, typer.Option(help="What it runs on.")] = GpuName.H100,
    precision: Precision = None,
    headroom: Headroom = 0.3,
    gpu_price: GpuPrice = None,
    budget: Budget = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """How many GPUs, colocated or disaggregated, and what they cost."""
    from cli.quantities import duration
    from cli.quantities import rate as rate_of
    from measure.plan.price import GPU_HOUR
    from measure.plan.sizing import Asked
    from measure.plan.slo import Slo
    from measure.simulation import roofline

    if sum(one is not None for one in (trace, capacity, bench)) > 1:
        raise CliError("give one of --trace, --capacity and --bench: each is what to plan by")
    slo = Slo(duration(ttft_p99), duration(itl_p99))
    gpu_hour = GPU_HOUR[gpu.value] if gpu_price is None else gpu_price
    wanted = None if rate is None else rate_of(rate)
    levers: list[Lever] = []
    if capacity is not None or bench is not None:
        if wanted is None:
            raise CliError("--rate is needed with --capacity and --bench")
        per_replica = None if capacity is None else rate_of(capacity)
        sizing = _measured(per_replica, bench, replica_gpus, wanted, headroom, gpu_hour)
    else:
        if trace is None:
            raise CliError("--trace says what the traffic is like; or give --capacity or --bench")
        traffic, wanted = _traffic(trace, wanted, headroom, slo)
        asked = Asked(
            roofline.MODELS[model.value],
            roofline.GPUS[gpu.value],
            wanted,
            slo,
            gpu_hour,
            tuple(roofline.Precision(it.value) for it in PrecisionName if precision in (None, it)),
            headroom,
        )
        with _progress() as report:
            sizing, levers = _modelled(traffic, asked, budget, report)
    if as_json:
        print(json.dumps(_document(sizing, levers, wanted, headroom, gpu_hour), indent=2))
        return
    from cli.console import console
    from cli.plan_table import picture

    price = f"${gpu_hour:,.2f} an hour of a GPU{' (assumed)' if gpu_price is None else ''}"
    console().print(picture(sizing, levers, (wanted, headroom, price), budget))


def _measured(
    capacity: float | None,
    bench: Path | None,
    gpus: int,
    rate: float,
    headroom: float,
    gpu_hour: float,
) -> Sizing:
    """Of what was measured, at a rate a second."""
    from measure.plan.sizing import Measured, size_measured

    if bench is None:
        assert capacity is not None
        return size_measured({"replicas": Measured(capacity, gpus)}, rate, headroom, gpu_hour)
    from measure.bench.document import DocumentError, capacities

    try:
        found = capacities(bench.read_bytes(), gpus)
    except OSError as error:
        raise CliError(f"{bench}: {error.strerror}") from None
    except DocumentError as error:
        raise CliError(f"{bench}: {error}") from None
    return size_measured(found, rate, headroom, gpu_hour)


def _traffic(trace: str, rate: float | None, headroom: float, slo: Slo) -> tuple[Traffic, float]:
    """Enough of it to tell, and the rate that is planned for."""
    from cli.traffic import arrivals
    from measure.plan.fleet import Traffic

    # A mix has whatever rate it is played at: how many there are is what counts.
    coming = arrivals(trace, _MOST_REQUESTS, 1.0, 1)
    if len(coming) < 2 or not coming[-1].at_s:
        raise CliError(f"{trace} is too short to plan by")
    wanted = rate or len(coming) / coming[-1].at_s
    enough = ceil(wanted * (1 + headroom) * _OF_SLO * slo.ttft_p99_s)
    return Traffic(coming[: min(max(enough, _LEAST_REQUESTS), _MOST_REQUESTS)]), wanted


def _modelled(
    traffic: Traffic, asked: Asked, budget: float | None, report: Report
) -> tuple[Sizing, list[Lever]]:
    from measure.plan.levers import levers
    from measure.plan.sizing import size
    from pdserve.types import Mode

    sizing = size(traffic, asked, report)
    best = sizing.cheapest
    if budget is None:
        return sizing, []
    if best is not None and (fleet := sizing.fleets[best]) and fleet.cost.hour <= budget:
        return sizing, []
    return sizing, levers(traffic, asked, Mode(best or Mode.COLOCATED), report)


@contextmanager
def _progress() -> Iterator[Report]:
    """On a terminal, what is being tried."""
    from rich.console import Console

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with console.status("planning") as status:
        yield status.update


def _document(
    sizing: Sizing, levers: list[Lever], rate: float, headroom: float, gpu_hour: float
) -> dict[str, object]:
    """Rates in requests a second, money in dollars."""
    return {
        "rate": rate,
        "headroom": headroom,
        "gpu_hour": gpu_hour,
        "fleets": {
            name: None if fleet is None else asdict(fleet) | {"gpus": fleet.gpus}
            for name, fleet in sizing.fleets.items()
        },
        "cheapest": sizing.cheapest,
        "margin": sizing.margin,
        "levers": [
            {"name": it.name, "cost_hour": None if it.fleet is None else it.fleet.cost.hour}
            for it in levers
        ],
    }
