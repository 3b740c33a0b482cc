"""What the two ends of a way have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

HOLDER, READER = 1, 2
"""The sides, as the blocks of their caches are marked."""


class WayError(Exception):
    """A copy that did not come, or came wrong."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one copy is about. `chunk_s` paces the holder; 0 has all blocks readable at once."""

    number: int
    num_tokens: int
    num_bytes: int
    theirs: list[int]
    ours: list[int]
    chunk_s: float = 0.0


class Source(Protocol):
    """The holder's end."""

    def hello(self) -> Any:
        """What the reader's end must know."""
        ...

    def expect(self, prompt: Prompt) -> None: ...

    def close(self) -> None: ...


class Link(Protocol):
    """The reader's end."""

    def copy(self, prompt: Prompt) -> None:
        """Returns when everything is there. Raises WayError."""
        ...

    def close(self) -> None: ...


def until(done: Callable[[], bool], num_bytes: int) -> None:
    """Asks so often that it adds little to the time of a copy, and takes little from it."""
    interval = min(1e-3, num_bytes * 2e-11)
    while not done():
        time.sleep(interval)
