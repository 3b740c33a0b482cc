"""`python -m measure.kv_transfer`: measures, shows the tables, and writes them where asked."""

from __future__ import annotations

import asyncio
import os

import psutil
from rich.console import Console

from measure import command
from measure.kv_transfer import plan, report
from measure.kv_transfer.plan import Measured
from measure.processes import BenchError

_MODULE = "measure.kv_transfer"
_PACKAGES = ("grpcio", "nixl", "torch", "numpy", "xxhash")


def main() -> None:
    asked = command.parser(_MODULE, __doc__, repeats=5, repeated="way").parse_args()

    def measure(console: Console) -> command.Measured:
        holder, reader = _cores()
        notes = [f"The holder is pinned to core {holder}, the reader to core {reader}."]
        measured = asyncio.run(_measure(asked.repeats, (holder, reader), notes, console))
        return measured, notes

    command.run(asked, _MODULE, _PACKAGES, measure, report.render, report.SECTION)


def _cores() -> tuple[int, int]:
    """The holder's and the reader's. Raises BenchError on a machine with a single core."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise BenchError("two cores are needed: one for the holder, one for the reader")
    return others[0], first


async def _measure(
    repeats: int, cores: tuple[int, int], notes: list[str], console: Console
) -> list[Measured]:
    """Adds to `notes` what the machine has no room for."""
    command.stop_on_signals()
    measured: list[Measured] = []
    for model in plan.MODELS:
        fitting = plan.fitting(model, plan.NUM_TOKENS, psutil.virtual_memory().available)
        for num_tokens in sorted({*plan.NUM_TOKENS} - {*fitting}):
            notes.append(f"{model.name} with {num_tokens:,} tokens: not enough memory was free.")
        if not fitting:
            continue
        with console.status(model.name):
            async for news in plan.measure(model, fitting, repeats, cores):
                measured.append(news)
                copied = news.copied
                tail = ", the tail" if copied.paced else ""
                console.print(
                    f"{model.name}, {copied.num_tokens:,} tokens, {copied.way}{tail}: "
                    f"{copied.seconds * 1e3:.1f} ms"
                )
    return measured


if __name__ == "__main__":
    main()
