"""vLLM's events of its prefix cache, put into our names of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.cached_blocks import CachedBlocks
from pdserve.engine.vllm_cache import BlockNames
from pdserve.prefix import chain

SIZE = 4
PROMPT = tuple(range(12))


@dataclass
class BlockStored:
    """As vLLM's; blocks are called by letters."""

    block_hashes: str
    token_ids: tuple[int, ...]
    parent_block_hash: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    block_size: int = SIZE
    lora_name: str | None = None
    group_idx: int | None = 0


@dataclass
class BlockRemoved:
    block_hashes: str
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    pass


@dataclass
class Engine:
    """What has been told, after events."""

    blocks: CachedBlocks = field(default_factory=CachedBlocks)

    def __post_init__(self) -> None:
        self.names = BlockNames(SIZE, self.blocks)

    def tell(self, *events: Any) -> None:
        for event in events:
            self.names.take(event)

    def held(self, prompt: tuple[int, ...] = PROMPT, salt: str = "", lora: str = "") -> list[bool]:
        return [name in self.blocks for name in chain(prompt, salt, SIZE, lora)]


def test_blocks_are_named_by_their_tokens_and_what_is_before_them() -> None:
    engine = Engine()
    engine.tell(BlockStored("ab", PROMPT[:8]), BlockStored("c", PROMPT[8:], "b"))
    assert engine.held() == [True, True, True]
    assert len(engine.blocks) == 3
    assert engine.names.complete


def test_the_salt_stands_with_the_first_block() -> None:
    engine = Engine()
    engine.tell(BlockStored("ab", PROMPT[:8], extra_keys=[("mine",), None]))
    engine.tell(BlockStored("c", PROMPT[8:], "b", extra_keys=[None]))
    assert engine.held(salt="mine") == [True, True, True]
    assert engine.held() == [False, False, False]


@pytest.mark.parametrize("salt", ["", "mine"])
def test_the_adapter_stands_with_every_block(salt: str) -> None:
    engine = Engine()
    first = ("french", salt) if salt else ("french",)
    engine.tell(BlockStored("ab", PROMPT[:8], None, [first, ("french",)], lora_name="french"))
    engine.tell(BlockStored("c", PROMPT[8:], "b", [("french",)], lora_name="french"))
    assert engine.names.complete
    assert engine.held(salt=salt, lora="french") == [True, True, True]
    assert engine.held(salt=salt) == engine.held(salt="french") == [False, False, False]


def test_a_block_that_is_there_twice_goes_with_its_last_copy() -> None:
    engine = Engine()
    engine.tell(BlockStored("a", PROMPT[:4]), BlockStored("a", PROMPT[:4]), BlockRemoved("a"))
    assert engine.held() == [True, False, False]
    engine.tell(BlockRemoved("a"))
    assert engine.held() == [False, False, False]
    engine.tell(BlockRemoved("a"), BlockStored("a", PROMPT[:4]))
    assert engine.held() == [True, False, False]


def test_a_cache_that_is_cleared_holds_nothing() -> None:
    engine = Engine()
    engine.tell(BlockStored("ab", PROMPT[:8]), AllBlocksCleared())
    assert engine.held() == [False, False, False]
    engine.tell(BlockStored("a", PROMPT[:4]))
    assert engine.held() == [True, False, False]


@pytest.mark.parametrize(
    "event",
    [
        BlockStored("c", PROMPT[8:], "unheard-of"),
        BlockStored("a", PROMPT[:4], extra_keys=[("salt", "something else")]),
        BlockStored("a", PROMPT[:4], extra_keys=[(("image", 0),)]),
        BlockStored("ab", PROMPT[:8], extra_keys=[("french",), None], lora_name="french"),
        BlockStored("a", PROMPT[:4], extra_keys=[None], lora_name="french"),
        BlockStored("ab", PROMPT[:8], extra_keys=[None, (("image", 0),)]),
        BlockStored("a", PROMPT[:2], block_size=2),
        BlockStored("a", PROMPT[:4], group_idx=1),
        BlockRemoved("a", group_idx=1),
    ],
)
def test_what_cannot_be_named_is_left_out(event: Any) -> None:
    engine = Engine()
    engine.tell(event)
    assert (len(engine.blocks), engine.names.complete) == (0, False)
    engine.tell(BlockStored("z", PROMPT[8:], "c"), BlockRemoved("abcz"))
    assert len(engine.blocks) == 0
