"""`pdserve simulate`"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import GpuName, ModelName, PrecisionName, Tpot, Ttft
from cli.traffic import TRAFFIC
from pdserve.targets import ITL_S, TTFT_S

if TYPE_CHECKING:
    from measure.simulation.fault_run import Result
    from measure.simulation.trace_run import Summary

app = typer.Typer(
    help="A fleet in virtual time: the real coordinator on simulated GPUs.", no_args_is_help=True
)


class ModeName(StrEnum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    AUTO = "auto"


class BalanceName(StrEnum):
    PREFIX_AWARE = "prefix-aware"
    LEAST_OUTSTANDING = "least-outstanding"
    POWER_OF_TWO = "power-of-two"
    ROUND_ROBIN = "round-robin"


class DeciderName(StrEnum):
    THRESHOLD = "threshold"
    ESTIMATE = "estimate"


@app.command()
def trace(  # noqa: PLR0913  (one option each)
    traffic: Annotated[
        str,
        typer.Argument(metavar="FILE|MIX", help=TRAFFIC),
    ],
    *,
    mode: Annotated[ModeName, typer.Option(help="Where prompts are read.")] = ModeName.AUTO,
    policy: Annotated[
        BalanceName, typer.Option(help="Which worker of a pool gets a request.")
    ] = BalanceName.PREFIX_AWARE,
    decider: Annotated[DeciderName, typer.Option(help="What auto goes by.")] = DeciderName.ESTIMATE,
    workers: Annotated[int, typer.Option(min=1, help="In all.")] = 8,
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Of these, only read, for others; default: 3/8.")
    ] = None,
    model: Annotated[ModelName, typer.Option(help="What is served.")] = ModelName.LLAMA_8B,
    gpu: Annotated[GpuName, typer.Option(help="What it runs on.")] = GpuName.H100,
    precision: Annotated[PrecisionName, typer.Option(help="Of weights.")] = PrecisionName.BF16,
    tp: Annotated[int, typer.Option("--tp", min=1, max=8, help="GPUs a worker.")] = 1,
    speedup: Annotated[float, typer.Option(min=0.001, help="How much faster it arrives.")] = 1.0,
    rate: Annotated[float, typer.Option(min=0.001, help="Of a mix: requests a second.")] = 20.0,
    duration: Annotated[float, typer.Option(min=1, help="Of a mix, in seconds.")] = 300.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests.")] = None,
    seed: Annotated[int, typer.Option(help="Of a mix.")] = 1,
    ttft: Ttft = TTFT_S,
    tpot: Tpot = ITL_S,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Traffic through a fleet: latencies, goodput, cache hits and GPU-hours."""
    import json

    from cli.failure import CliError
    from cli.traffic import arrivals
    from measure.simulation import roofline
    from measure.simulation.trace_run import Setup, Targets, simulate, summary
    from measure.simulation.traces import faster
    from pdserve.types import Mode

    coming = arrivals(traffic, duration, rate, seed)[:limit]
    given = workers * 3 // 8 if prefill is None else prefill
    if mode is ModeName.DISAGGREGATED and not 0 < given < workers:
        raise CliError("disaggregated: some workers must read, and some write; see --prefill")
    setup = Setup(
        Mode(mode.value),
        workers,
        min(given, workers),
        roofline.MODELS[model.value],
        roofline.GPUS[gpu.value],
        roofline.Precision(precision.value),
        tp,
        balance=policy.value,
        decider=decider.value,
        targets=Targets(ttft, tpot),
    )
    try:
        seen = simulate(faster(coming, speedup), setup)
    except ValueError as error:
        raise CliError(str(error)) from None
    told = summary(seen, setup.targets)
    print(json.dumps(asdict(told), indent=2) if as_json else _words(told))


@app.command()
def faults(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Goes on for so long instead, with fresh seeds.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="This run alone, told step by step.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at once; default: one a core.")
    ] = None,
) -> None:
    """Faults of every kind at every moment, drawn from seeds; then the invariants are checked."""
    import os
    import time
    from itertools import count, takewhile

    from measure.simulation.faults import play_all

    if seed is not None:
        tally = play_all([seed], _tell_whole, processes=1)
    else:
        given: Iterable[int] = range(first, first + seeds)
        if seconds is not None:
            end = time.monotonic() + seconds
            given = takewhile(
                lambda _: time.monotonic() < end, count(first or time.time_ns() % 10**9)
            )
        tally = play_all(given, _tell_broken, jobs or len(os.sched_getaffinity(0)))
        print(f"requests {tally.requests}: {_counts(tally.ends)}")
        print(f"faults {tally.faults.total()}: {_counts(tally.faults)}")
    print(f"seeds {tally.runs}, invariants broken {tally.broken}")
    if tally.broken:
        raise typer.Exit(1)


@app.command()
def compare(
    folder: Annotated[Path, typer.Argument(help="Where the public traces are.")],
    *,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page whose generated part is renewed.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at once; default: one a core.")
    ] = None,
) -> None:
    """Modes and routing policies side by side, as in docs/simulation.md."""
    import os

    from cli.failure import CliError
    from measure.simulation import comparison
    from measure.simulation.traces import TraceError

    try:
        text = comparison.compare(folder, _progress, jobs or len(os.sched_getaffinity(0)))
    except (OSError, TraceError) as error:
        raise CliError(str(error)) from None
    print(text)
    if write is not None:
        write.write_text(comparison.SECTION.replace(write.read_text(), text))


def _progress(words: str) -> None:
    import sys

    print(words, file=sys.stderr, flush=True)


def _tell_whole(result: Result) -> None:
    print("\n".join((*result.journal, result.digest)))


def _tell_broken(result: Result) -> None:
    for words in result.broken:
        print(f"seed {result.seed}: {words}", flush=True)
    if result.broken:
        print(f"again: pdserve simulate faults --seed {result.seed}", flush=True)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())


def _words(told: Summary) -> str:
    modes = ", ".join(f"{number} {mode}" for mode, number in sorted(told.modes.items()))
    lines = [
        f"requests   {told.requests}, {told.failed} failed; {modes}",
        *(f"           {number} {reason}" for reason, number in sorted(told.failures.items())),
        f"TTFT       {_row(told.ttft_ms.p50, told.ttft_ms.p90, told.ttft_ms.p99)}",
        f"ITL        {_row(told.itl_ms.p50, told.itl_ms.p90, told.itl_ms.p99)}",
        f"goodput    {told.goodput:.2f} requests/s; {told.good:.1%} met both targets",
        f"cache hits {told.hit_rate:.1%} of prompt tokens",
        f"cost       {told.gpu_hours:.2f} GPU-hours in {told.duration_s:.0f} s",
    ]
    return "\n".join(lines)


def _row(p50: float, p90: float, p99: float) -> str:
    return f"p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f} ms"
