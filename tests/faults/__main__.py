"""`make soak`: case after case with new seeds, until the time is over; then says what was found."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated

import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from tests.faults.runner import Result, run_cases
from tests.faults.scenarios import TRANSPORTS, Case, Event, Moment, sweeps

console = Console()


class Tally:
    """What has been run, by cell, and what was found."""

    def __init__(self) -> None:
        self.cases: Counter[tuple[Event, Moment]] = Counter()
        self.broken: list[Result] = []

    def add(self, result: Result) -> None:
        self.cases[result.case.event, result.case.moment] += 1
        if result.found:
            self.broken.append(result)
            console.print(str(result), style="red", highlight=False, soft_wrap=True)

    def table(self) -> Table:
        """Cases by cell, both transports together; broken ones behind a stroke."""
        broken = Counter((r.case.event, r.case.moment) for r in self.broken)
        moments = (Column(moment, overflow="fold") for moment in Moment)
        table = Table(Column("event", no_wrap=True), *moments)
        for event in Event:
            cells = [(event, moment) for moment in Moment]
            table.add_row(
                event,
                *(
                    f"{self.cases[cell]}" + (f" / [red]{broken[cell]}" if broken[cell] else "")
                    for cell in cells
                ),
            )
        return table


def main(
    seconds: Annotated[float, typer.Option(envvar="SOAK_S", help="how long to go on")] = 3600,
    seed: Annotated[int | None, typer.Option(help="of the first sweep; random if none")] = None,
    fleets: Annotated[int, typer.Option(help="fleets for each transport")] = 2,
    case: Annotated[str | None, typer.Option(help="this one alone, once")] = None,
) -> None:
    """Takes fleets of simulated workers through every event at every moment."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tally = Tally()
    if case is not None:
        only = Case.from_name(case)
        chosen = {t: iter([only] if t == only.transport else []) for t in TRANSPORTS}
        asyncio.run(run_cases(chosen, 1, tally.add))
    else:
        first = random.randrange(1_000_000) if seed is None else seed
        console.print(f"seed {first}, {seconds:g} s, {2 * fleets} fleets")
        _soak(first, seconds, fleets, tally)
        console.print(tally.table())
    total = tally.cases.total()
    console.print(f"{total} cases, {len(tally.broken)} that broke an invariant")
    raise typer.Exit(1 if tally.broken else 0)


def _soak(seed: int, seconds: float, fleets: int, tally: Tally) -> None:
    begun = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("soak", total=seconds)

        def told(result: Result) -> None:
            tally.add(result)
            words = f"{tally.cases.total()} cases, {len(tally.broken)} broken"
            progress.update(bar, completed=time.monotonic() - begun, description=words)

        def in_time(_: Case) -> bool:
            return time.monotonic() - begun < seconds

        def over(transport: str) -> Iterator[Case]:
            of_one = (case for case in sweeps(seed) if case.transport == transport)
            return takewhile(in_time, of_one)

        asyncio.run(run_cases({name: over(name) for name in TRANSPORTS}, fleets, told))


if __name__ == "__main__":
    typer.run(main)
