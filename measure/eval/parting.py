"""Where two greedy answers to one question part, and whether rounding explains it. Pure.

Two ways of computing the same sum in bfloat16 may round it differently, and so may turn which of
two tokens is the best where both are nearly so. Any other difference is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

NEAR_TIE = 0.51
"""How far apart log probabilities may be, in nats, that rounding turns: four steps of a bfloat16
logit between 16 and 32, and what float32 adds. What rounding was seen to do: docs/eval.md."""

TOP = 5
"""Tokens of each position whose log probabilities are asked for."""


class Position(NamedTuple):
    """A token of an answer, and the log probabilities of the likeliest ones in its place."""

    token: str
    top: Mapping[str, float]

    def ahead_of(self, other: str) -> float | None:
        """How far; at least, where the other is not among the likeliest, and None where that
        leaves open whether it is a near tie, as where a grammar forbids the likeliest ones."""
        if other in self.top:
            return self.top[self.token] - self.top[other]
        least = self.top[self.token] - min(self.top.values())
        return least if least > NEAR_TIE else None


class Parting(msgspec.Struct, frozen=True):
    """`at` is the number of tokens that are the same, `gap` how far apart the log probabilities
    of the two next ones are, on the way that tells them further apart; None where no log
    probabilities tell."""

    at: int
    gap: float | None = None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap <= NEAR_TIE

    @property
    def is_fault(self) -> bool:
        return self.gap is not None and self.gap > NEAR_TIE


def parting(one: Sequence[Position], other: Sequence[Position]) -> Parting:
    """Of two answers whose texts differ."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here.token != there.token:
            gaps = (here.ahead_of(there.token), there.ahead_of(here.token))
            known = [gap for gap in gaps if gap is not None]
            widest = max(known, default=0.0)
            return Parting(at, widest if widest > NEAR_TIE or len(known) == len(gaps) else None)
    return Parting(min(len(one), len(other)))
