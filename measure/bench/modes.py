"""The same load on every mode of serving: two workers that read and write, and the same two as
a prefill and a decode worker, split always or request by request."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from measure.bench.answer import Answer
from measure.bench.drive import Target, drive
from measure.processes import child, python
from measure.simulation.traces import Arrival
from pdserve.types import Mode

_START_S = 240.0
_MODE_HEADER = "x-pdserve-mode"
LONG_TOKENS = 600
"""Prompts from here on are told apart as long."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Two kinds of requests, each Poisson: `rate` in requests a second, lengths in tokens."""

    name: str
    chat_rate: float
    chat_tokens: tuple[int, int] = (30, 60)
    chat_answer: int = 48
    long_rate: float = 0.0
    long_tokens: tuple[int, int] = (1_200, 1_800)
    long_answer: int = 8


def arrivals(mix: Mix, seconds: float, seed: int) -> list[Arrival]:
    """In order, all within `seconds`."""
    dice = random.Random(seed)
    chats = _poisson(dice, seconds, mix.chat_rate, mix.chat_tokens, mix.chat_answer)
    longs = _poisson(dice, seconds, mix.long_rate, mix.long_tokens, mix.long_answer)
    return sorted([*chats, *longs], key=lambda arrival: arrival.at_s)


def _poisson(
    dice: random.Random, seconds: float, rate: float, tokens: tuple[int, int], answer: int
) -> list[Arrival]:
    found: list[Arrival] = []
    at_s = dice.expovariate(rate) if rate else seconds
    while at_s < seconds:
        found.append(Arrival(at_s, dice.randint(*tokens), answer))
        at_s += dice.expovariate(rate)
    return found


@asynccontextmanager
async def fleets(flags: Sequence[str]) -> AsyncIterator[list[Target]]:
    """The three arms, on two fleets that run at once and take turns: idle, one costs the other
    a few hundredths of a core."""
    async with (
        _fleet(("--prefill", "0", "--decode", "2", *flags)) as both,
        _fleet(("--prefill", "1", "--decode", "1", *flags)) as pair,
    ):
        yield [
            Target(mode.value, *fleet, {_MODE_HEADER: mode.value})
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


async def slots(
    targets: Sequence[Target], mix: Mix, rounds: int, seconds: float
) -> AsyncIterator[tuple[Target, list[Answer]]]:
    """Each target in turn, `rounds` times; all get requests of the same lengths at the same times
    in a round, of other words: targets on one fleet share its prefix caches. A slot ends with its
    last answer, so nothing is carried over to the next."""
    for number in range(rounds):
        coming = arrivals(mix, seconds, seed=number)
        for place in range(len(targets)):
            # Whoever comes first in one round comes later in the next.
            target = targets[(place + number) % len(targets)]
            yield target, await drive(target, coming, seed=number * len(targets) + place)
