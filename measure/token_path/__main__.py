"""`python -m measure.token_path`: measures, shows the tables, and writes them where asked."""

from __future__ import annotations

import asyncio
import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measure import command
from measure.processes import BenchError
from measure.token_path import plan, report
from measure.token_path.jobs import Cores
from measure.token_path.plan import Measured, Plan
from measure.token_path.systems import SYSTEMS

_MODULE = "measure.token_path"
_PACKAGES = ("vllm-router", "grpcio", "protobuf", "uvicorn", "uvloop", "httptools")


def main() -> None:
    parser = command.parser(_MODULE, __doc__, repeats=2, repeated="system")
    parser.add_argument("--quick", action="store_true", help="windows of 3 s instead of 10")
    asked = parser.parse_args()
    timing = plan.QUICK_TIMING if asked.quick else plan.FULL_TIMING

    def measure(console: Console) -> command.Measured:
        cores = _cores()
        measured = asyncio.run(_measure(Plan(SYSTEMS, asked.repeats, timing), cores, console))
        return measured, _notes(cores, quick=asked.quick)

    command.run(asked, _MODULE, _PACKAGES, measure, report.render, report.SECTION)


def _cores() -> Cores:
    """Raises BenchError on a machine with a single core."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise BenchError("two cores are needed: one for the router, one for all else")
    return Cores(router=others[0], others=first)


def _notes(cores: Cores, *, quick: bool) -> list[str]:
    """What a reader must know of this run."""
    notes = [
        f"The router under test is pinned to core {cores.router}; its sources and the load "
        f"client to core {cores.others}."
    ]
    if quick:
        notes.append("A quick run, with windows of 3 s: its figures are rough.")
    return notes


async def _measure(plan_: Plan, cores: Cores, console: Console) -> list[Measured]:
    command.stop_on_signals()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    measured: list[Measured] = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=plan_.measurements)
        async for news in plan.measure(plan_, cores):
            if isinstance(news, Measured):
                measured.append(news)
                progress.advance(bar)
                console.print(f"{news.system}, {news.scenario}: {_in_short(news)}")
            else:
                progress.update(bar, description=news.step)
    return measured


def _in_short(measured: Measured) -> str:
    rate = measured.outcome.rate
    return f"{rate.cpu_us:.1f} µs per token, {rate.tokens_per_s:,.0f} tokens/s"


if __name__ == "__main__":
    main()
