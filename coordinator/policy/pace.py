"""What is learned of how fast prompts are read: exponentially weighted, for predictions. Pure."""

from __future__ import annotations

import math

MEMORY_S = 20.0
"""Seconds of waiting after which what was measured counts for a third."""


def size_of(prompt_tokens: int) -> int:
    """Prompts of one size are within a factor of four of each other, or below 512 tokens.

    They form a line of their own, so that long ones do not hold short ones up, nor the other
    way round.
    """
    return max(0, prompt_tokens.bit_length() - 8) // 2


class Pace:
    """The rate at which a queue moves: tokens that left it, over the time in which some waited.

    Only that time counts, for only then is the rate what the workers can do and not what was
    asked of them.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._now = 0.0

    def go_on(self, now: float, *, waiting: bool) -> None:
        """Time has passed, all of it with or without somebody waiting."""
        if waiting and now > self._now:
            kept = math.exp((self._now - now) / MEMORY_S)
            self._tokens *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
        self._now = now

    def moved(self, tokens: float) -> None:
        """So many left the queue after a wait."""
        self._tokens += tokens

    def seconds(self, tokens: float) -> float:
        """How long so many take; 0 while none was seen to leave."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class OwnTime:
    """How long a prompt takes from being let in to its first token, by size."""

    def __init__(self, learn: float) -> None:
        """`learn` is the weight of the last of a size, 0 to 1."""
        self._learn = learn
        self._seconds: dict[int, float] = {}

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        size = size_of(prompt_tokens)
        known = self._seconds.setdefault(size, seconds)
        self._seconds[size] = known + self._learn * (seconds - known)

    def of(self, prompt_tokens: int) -> float:
        """As those of its size took; else as the next smaller size did, or nothing at all."""
        sizes = [size for size in self._seconds if size <= size_of(prompt_tokens)]
        return self._seconds[max(sizes)] if sizes else 0.0
