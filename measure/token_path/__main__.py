"""`python -m measure.token_path`: measures, shows the tables, and writes them where asked."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measure import machine
from measure.processes import BenchError
from measure.token_path import plan, report
from measure.token_path.jobs import Cores
from measure.token_path.plan import Measured, Plan
from measure.token_path.systems import SYSTEMS

_PACKAGES = ("vllm-router", "grpcio", "protobuf", "uvicorn", "uvloop", "httptools")


def main() -> None:
    asked = _arguments()
    timing = plan.QUICK_TIMING if asked.quick else plan.FULL_TIMING
    console = Console(stderr=True)
    try:
        cores = _cores()
        notes = _notes(cores, quick=asked.quick)
        measured = asyncio.run(_measure(Plan(SYSTEMS, asked.repeats, timing), cores, console))
    except BenchError as error:
        sys.exit(f"token path: {error}")
    except asyncio.CancelledError:
        sys.exit("token path: stopped by a signal; nothing was written")
    command = shlex.join(("python", "-m", "measure.token_path", *sys.argv[1:]))
    text = report.render(measured, machine.describe(_PACKAGES), command, notes)
    console.print(Markdown(text))
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.encode(measured))
    if asked.write is not None:
        page = asked.write.read_text() if asked.write.exists() else ""
        asked.write.write_text(report.SECTION.replace(page, text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m measure.token_path", description=__doc__)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every single outcome, as JSON")
    parser.add_argument("--quick", action="store_true", help="windows of 3 s instead of 10")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each system")
    return parser.parse_args()


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
    # Both, so that every way to stop the run takes the processes with it.
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
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
