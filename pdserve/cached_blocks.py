"""What an engine's prefix cache holds, and what whoever wants to know has not been told yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

PART_BLOCKS = 4096
"""The most blocks in one report: to take one in must not hold up a coordinator's streams."""


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks that a prefix cache gained and lost, by the names of `pdserve.prefix`.

    `anew` says that what was told before is void: what was gained begins a list of all.
    """

    anew: bool
    added: Sequence[int]
    removed: Sequence[int]


class CachedBlocks:
    """The blocks of one prefix cache, by the names of `pdserve.prefix`; kept by the engine.

    It lives on one event loop.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._listeners: set[Untold] = set()
        self.closed = False

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def add(self, blocks: Iterable[int]) -> None:
        """The cache has them from now on; it may have had some before."""
        if new := [block for block in blocks if block not in self._blocks]:
            self._blocks.update(new)
            for listener in self._listeners:
                listener.gained(new)

    def remove(self, blocks: Iterable[int]) -> None:
        """The cache has them no more; some it may never have had."""
        if gone := [block for block in blocks if block in self._blocks]:
            self._blocks.difference_update(gone)
            for listener in self._listeners:
                listener.lost(gone)

    def clear(self) -> None:
        self.remove(tuple(self._blocks))

    def close(self) -> None:
        """Nothing more will come, and whoever listens is woken."""
        self.closed = True
        for listener in self._listeners:
            listener.wake()

    def listen(self, wake: Callable[[], None]) -> Untold:
        """For one more who wants to know, and knows nothing yet; `wake` is called when there is
        something to be taken."""
        listener = Untold(self._blocks, wake)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Untold) -> None:
        self._listeners.discard(listener)


class Untold:
    """What one listener has not been told yet: the difference to what it knows.

    What comes and goes before it is taken is not told. One that is slow is told of fewer, larger
    changes, and of all blocks anew where that is less: what is kept for it is never more than
    what the cache holds, and what it has been told that it holds.
    """

    def __init__(self, blocks: set[int], wake: Callable[[], None]) -> None:
        """`blocks` are those of the cache, now and later."""
        self.wake = wake
        self._blocks = blocks
        self._knows_nothing = True
        self._gained: set[int] = set()
        self._lost: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether there is something to be taken."""
        return bool(self._knows_nothing or self._gained or self._lost)

    def gained(self, blocks: list[int]) -> None:
        self._differ(blocks, self._gained, self._lost)

    def lost(self, blocks: list[int]) -> None:
        self._differ(blocks, self._lost, self._gained)

    def _differ(self, blocks: list[int], these: set[int], those: set[int]) -> None:
        if self._knows_nothing:
            return
        for block in blocks:
            if block in those:
                those.remove(block)
            else:
                these.add(block)
        self.wake()

    def take(self) -> Iterator[CacheChange]:
        """All of it, in parts of PART_BLOCKS at most."""
        gained, lost, blocks = self._gained, self._lost, self._blocks
        anew = self._knows_nothing or len(gained) + len(lost) > len(blocks)
        self._knows_nothing = False
        self._gained, self._lost = set(), set()
        return _parts(anew, list(blocks if anew else gained), [] if anew else list(lost))


def _parts(anew: bool, added: list[int], removed: list[int]) -> Iterator[CacheChange]:
    for start in range(0, max(len(added), len(removed), 1), PART_BLOCKS):
        end = start + PART_BLOCKS
        yield CacheChange(anew and start == 0, added[start:end], removed[start:end])
