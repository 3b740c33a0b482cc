"""What each worker's prefix cache is believed to hold, and how much of a prompt that saves. Pure.

A worker that tells what its cache holds is believed; what it has just read is expected to be
there, and dropped unless it says so soon. Of one that tells nothing, what it was
given last is expected for good, as much of it as its cache has room for.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.prefix import chain

AGES_TO_CONFIRM = 4
"""What was expected is dropped when it has become older so often without being told."""

_SPARE_TOLD = 1024


class PromptBlocks:
    """A prompt in blocks of any size, hashed once for each size that is asked for."""

    def __init__(self, token_ids: tuple[int, ...], cache_salt: str, lora: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._lora = lora
        self._chains: dict[int, list[int]] = {}

    def chain(self, block_size: int) -> list[int]:
        """The names of all full blocks."""
        found = self._chains.get(block_size)
        if found is None:
            found = chain(self._token_ids, self._cache_salt, block_size, self._lora)
            self._chains[block_size] = found
        return found

    def reusable(self, block_size: int) -> list[int]:
        """Those that a cache can save: an engine computes a prompt's last token in any case."""
        return self.chain(block_size)[: (len(self._token_ids) - 1) // block_size]


class PrefixIndex:
    """Which caches hold which blocks: one map for all workers, from a block's name to a set of
    caches as bits, so that one walk along a prompt answers for every worker.

    About 90 bytes a block that is cached anywhere, and 8 to 16 more for each worker that has it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._free: list[int] = []
        self._joined = 0

    def join(self, block_size: int, capacity_tokens: int) -> CacheBelief:
        """The belief about one more cache, empty at first."""
        if not self._free:
            self._free.append(1 << self._joined)
            self._joined += 1
        return CacheBelief(self._holders, self._free, block_size, capacity_tokens)

    def cached_tokens(self, prompt: PromptBlocks, caches: Sequence[CacheBelief]) -> list[int]:
        """How many of a prompt's first tokens each cache is believed to save."""
        bits_by_size: dict[int, int] = {}
        for cache in caches:
            bits_by_size[cache.block_size] = bits_by_size.get(cache.block_size, 0) | cache.bit
        depths: dict[int, int] = {}
        for size, bits in bits_by_size.items():
            self._walk(prompt.reusable(size), bits, depths)
        return [depths.get(cache.bit, 0) * cache.block_size for cache in caches]

    def _walk(self, blocks: Sequence[int], left: int, depths: dict[int, int]) -> None:
        """Notes by each bit of `left` how many of the first blocks it has without a gap."""
        for depth, block in enumerate(blocks):
            held = self._holders.get(block, 0) & left
            if held != left:
                if depth:
                    _note(depths, left ^ held, depth)
                left = held
                if not left:
                    return
        _note(depths, left, len(blocks))


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        depths[lowest] = depth
        bits ^= lowest


class CacheBelief:
    """What one worker's cache is believed to hold; made by `PrefixIndex.join`.

    `len` counts blocks.
    """

    def __init__(
        self, holders: dict[int, int], free: list[int], block_size: int, capacity_tokens: int
    ) -> None:
        self.bit = free.pop()
        self.block_size = block_size
        self._holders = holders
        self._free = free
        self._max_blocks = capacity_tokens // block_size
        self._num_blocks = 0
        self._age = 0
        # By the age at which it was expected; the least recent first.
        self._expected: OrderedDict[int, int] = OrderedDict()
        # What was told, to be found again when it is to be forgotten; some twice, some gone.
        self._told = array("Q")

    def __len__(self) -> int:
        return self._num_blocks

    def expect(self, prompt: PromptBlocks) -> None:
        """The worker has read the prompt."""
        expected, holders = self._expected, self._holders
        blocks = prompt.chain(self.block_size)
        # The end of a prompt is of no use without its beginning, so it is forgotten first.
        for block in reversed(blocks):
            if block in expected or not holders.get(block, 0) & self.bit:
                expected[block] = self._age
                expected.move_to_end(block)
        self._gain(blocks)
        while len(expected) > self._max_blocks:
            self._lose((expected.popitem(last=False)[0],))

    def apply(self, added: Iterable[int], removed: Iterable[int]) -> None:
        """The worker tells which blocks its cache has gained and lost since its last report."""
        expected, before = self._expected, len(self._told)
        self._told.extend(added)
        gained, lost = self._told[before:], array("Q", removed)
        if expected:
            for block in (*gained, *lost):
                expected.pop(block, None)
        self._gain(gained)
        self._lose(lost)
        if len(self._told) > 2 * self._num_blocks + _SPARE_TOLD:
            told = {block for block in self._told if self._holders.get(block, 0) & self.bit}
            self._told = array("Q", told)

    def grow_older(self) -> None:
        """To be called now and then for a worker that tells, whether it tells anything or not:
        what comes and goes between two reports is in neither."""
        self._age += 1
        expected = self._expected
        while expected and self._age - next(iter(expected.values())) >= AGES_TO_CONFIRM:
            self._lose((expected.popitem(last=False)[0],))

    def forget(self) -> None:
        """Drops all that was told: the worker begins anew to tell what it holds."""
        self._lose(block for block in self._told if block not in self._expected)
        self._told = array("Q")

    def leave(self) -> None:
        """The cache is gone; nothing may be called any more."""
        self._lose(self._expected)
        self._expected.clear()
        self.forget()
        self._free.append(self.bit)

    def _gain(self, blocks: Iterable[int]) -> None:
        holders, get, bit = self._holders, self._holders.get, self.bit
        gained = 0
        for block in blocks:
            held = get(block)
            if held is None:
                holders[block] = bit
            elif held & bit:
                continue
            else:
                holders[block] = held | bit
            gained += 1
        self._num_blocks += gained

    def _lose(self, blocks: Iterable[int]) -> None:
        holders, get, bit = self._holders, self._holders.get, self.bit
        lost = 0
        for block in blocks:
            held = get(block, 0)
            if held == bit:
                del holders[block]
            elif held & bit:
                holders[block] = held ^ bit
            else:
                continue
            lost += 1
        self._num_blocks -= lost
