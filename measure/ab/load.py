"""Chats with long prompts mixed in, as heavy for one machine as for another. Pure.

Rates are told by how many requests would be under way at once, if each took no longer than one
that has the machine for itself (Little's law), and targets are multiples of what such a request
takes, as in "DistServe" (Zhong et al., OSDI 2024), whose "SLO scale" that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from measure.bench.answer import Answer
from measure.bench.summary import Targets
from measure.simulation.traces import Arrival

TTFT_SCALE = 4.0
TPOT_SCALE = 1.5


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind: the fewest and the most tokens of a prompt, and those of an answer."""

    prompt_tokens: tuple[int, int]
    answer_tokens: int

    def request(self, at_s: float, dice: Random) -> Arrival:
        return Arrival(at_s, dice.randint(*self.prompt_tokens), self.answer_tokens)


CHAT = Kind((30, 60), 24)
LONG = Kind((1_200, 1_800), 8)


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds that a request takes which has the machine for itself: a chat, each of its tokens
    after the first, a long prompt, and its first token."""

    chat_s: float
    chat_token_s: float
    long_s: float
    long_first_s: float

    @property
    def targets(self) -> Targets:
        return Targets(TTFT_SCALE * self.long_first_s, TPOT_SCALE * self.chat_token_s)


def alone(chats: Sequence[Answer], longs: Sequence[Answer]) -> Alone:
    """From answers to requests that came one after another; at least one of each kind."""
    return Alone(
        chat_s=median(answer.end_s for answer in chats),
        chat_token_s=median(answer.tpot_s for answer in chats),
        long_s=median(answer.end_s for answer in longs),
        long_first_s=median(answer.first_s for answer in longs),
    )


@dataclass(frozen=True, slots=True)
class Mix:
    """How many of each kind would be under way at once, if nobody waited for anybody."""

    name: str
    chats: float
    longs: float = 0.0

    def arrivals(self, machine: Alone, seconds: float, seed: int) -> list[Arrival]:
        """Poisson, in order, all within `seconds`."""
        dice = Random(seed)
        found = [
            *_poisson(dice, seconds, self.chats / machine.chat_s, CHAT),
            *_poisson(dice, seconds, self.longs / machine.long_s, LONG),
        ]
        return sorted(found, key=lambda arrival: arrival.at_s)


def _poisson(dice: Random, seconds: float, rate: float, kind: Kind) -> list[Arrival]:
    found: list[Arrival] = []
    at_s = dice.expovariate(rate) if rate else seconds
    while at_s < seconds:
        found.append(kind.request(at_s, dice))
        at_s += dice.expovariate(rate)
    return found
