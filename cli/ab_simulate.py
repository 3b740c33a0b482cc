"""`pdserve ab simulate`"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import GpuHour, GpuName, ModelName, Tpot, Ttft
from cli.traffic import TRAFFIC
from pdserve.targets import ITL_S, TTFT_S

if TYPE_CHECKING:
    from measure.simulation.trace_run import Setup
    from measure.simulation.traces import Arrival

_PLANNED_ON = 400
"""Requests on which splits are compared."""


def simulate(  # noqa: PLR0913  (one option each)
    traffic: Annotated[
        str,
        typer.Argument(metavar="FILE|MIX", help=TRAFFIC),
    ],
    *,
    workers: Annotated[int, typer.Option(min=2, help="Of each arm.")] = 8,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Of these, only read; default: as planned.")
    ] = None,
    model: Annotated[ModelName, typer.Option(help="What is served.")] = ModelName.LLAMA_70B,
    gpu: Annotated[GpuName, typer.Option(help="What it runs on.")] = GpuName.H100,
    tp: Annotated[int, typer.Option("--tp", min=1, max=8, help="GPUs a worker.")] = 4,
    speedup: Annotated[float, typer.Option(min=0.001, help="How much faster it arrives.")] = 1.0,
    slot: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Of a slot.")] = 60.0,
    washout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Of each slot, that does not count.")
    ] = 15.0,
    blocks: Annotated[int | None, typer.Option(min=1, help="Only so many slots.")] = None,
    ttft: Ttft = TTFT_S,
    tpot: Tpot = ITL_S,
    gpu_hour: GpuHour = None,
) -> None:
    """The report of an experiment on simulated GPUs: colocated, or disaggregated as planned."""
    from dataclasses import replace

    from cli.ab import show
    from cli.failure import CliError
    from cli.traffic import arrivals
    from measure.ab.simulated import play
    from measure.ab.words import render
    from measure.simulation.roofline import GPUS, MODELS
    from measure.simulation.trace_run import Setup, Targets
    from measure.simulation.traces import faster
    from pdserve.ab.report import compare
    from pdserve.types import Mode

    coming = faster(arrivals(traffic, 20 * slot, 20.0, 1), speedup)
    if blocks is not None:
        coming = [arrival for arrival in coming if arrival.at_s <= (blocks + 0.01) * slot]
    colocated = Setup(
        Mode.COLOCATED, workers, 0, MODELS[model.value], GPUS[gpu.value], tensor_parallel=tp,
        targets=Targets(ttft, tpot),
    )  # fmt: skip
    try:
        if prefill is None:
            prefill = _planned(coming, colocated)
        if not 0 < prefill < workers:
            raise CliError("some workers must read, and some write; see --prefill")
        split = replace(colocated, mode=Mode.DISAGGREGATED, prefill=prefill)
        arms = {"colocated": colocated, f"{prefill}:{workers - prefill}": split}
        seen = play(traffic, coming, arms, slot, washout, _tell)
    except ValueError as error:
        raise CliError(str(error)) from None
    show(render(seen, compare(seen, gpu_hour)))


def _planned(coming: list[Arrival], setup: Setup) -> int:
    """Workers that only read, by `pdserve plan`'s search for the split that serves most."""
    from measure.plan.fleet import Traffic
    from measure.plan.sizing import best_split
    from measure.plan.slo import Slo

    traffic = Traffic(coming[:_PLANNED_ON])
    slo = Slo(setup.targets.ttft_s, setup.targets.tpot_s)
    split, saturation = best_split(traffic, setup, slo, traffic.own_rate)
    _tell(
        f"planned: {split.prefill} of {split.workers} workers read; "
        f"{saturation.rate:.2f} requests/s, of {traffic.own_rate:.2f} that come"
    )
    return split.prefill


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
