"""`python -m measure.kv_transfer`: measures, shows the tables, and writes them where asked."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.markdown import Markdown

from measure import machine
from measure.kv_transfer import plan, report
from measure.kv_transfer.plan import Measured
from measure.processes import BenchError

_PACKAGES = ("grpcio", "nixl", "torch", "numpy", "xxhash")


def main() -> None:
    asked = _arguments()
    console = Console(stderr=True)
    try:
        holder, reader = _cores()
        notes = [f"The holder is pinned to core {holder}, the reader to core {reader}."]
        measured = asyncio.run(_measure(asked.repeats, (holder, reader), notes, console))
    except BenchError as error:
        sys.exit(f"kv transfer: {error}")
    except asyncio.CancelledError:
        sys.exit("kv transfer: stopped by a signal; nothing was written")
    command = shlex.join(("python", "-m", "measure.kv_transfer", *sys.argv[1:]))
    text = report.render(measured, machine.describe(_PACKAGES), command, notes)
    console.print(Markdown(text))
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.encode(measured))
    if asked.write is not None:
        page = asked.write.read_text() if asked.write.exists() else ""
        asked.write.write_text(report.SECTION.replace(page, text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m measure.kv_transfer", description=__doc__)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every single copy, as JSON")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each way")
    return parser.parse_args()


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
    # Both, so that every way to stop the run takes the processes with it.
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
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
