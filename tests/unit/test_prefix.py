"""Which leading blocks two prompts share, and what is believed of the caches that hold them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from coordinator.policy.prefix import AGES_TO_CONFIRM, CacheBelief, PrefixIndex, PromptBlocks
from pdserve.prefix import chain, extend, root

SIZE = 32
PROMPT = tuple(range(4 * SIZE + 5))


def blocks(prompt: tuple[int, ...] = PROMPT, salt: str = "", size: int = SIZE) -> PromptBlocks:
    return PromptBlocks(prompt, salt)


def told(salt: str = "", size: int = SIZE) -> list[int]:
    return chain(PROMPT, salt, size)


def tokens(index: PrefixIndex, *caches: CacheBelief, salt: str = "") -> list[int]:
    return index.cached_tokens(blocks(salt=salt), caches)


# Names of blocks.


def test_a_chain_has_a_name_for_each_full_block() -> None:
    assert len(chain(PROMPT, "", SIZE)) == 4
    assert len(chain(PROMPT, "", 16)) == 8
    assert chain(PROMPT[: SIZE - 1], "", SIZE) == []


def test_a_name_stands_for_the_salt_and_all_tokens_up_to_the_block_s_end() -> None:
    """By hand: little-endian tokens of 4 bytes, hashed with the parent's name as the seed."""
    first = xxh3_64_intdigest(bytes([1, 0, 0, 0, 2, 0, 0, 0]), seed=xxh3_64_intdigest(b"salt"))
    second = xxh3_64_intdigest(bytes([3, 0, 0, 0, 0, 1, 0, 0]), seed=first)
    assert chain((1, 2, 3, 256, 9), "salt", 2) == [first, second]


def test_prompts_share_the_names_of_their_common_beginning() -> None:
    other = (*PROMPT[: 2 * SIZE], 99, *PROMPT[2 * SIZE + 1 :])
    ours, theirs = chain(PROMPT, "", SIZE), chain(other, "", SIZE)
    assert ours[:2] == theirs[:2]
    assert not set(ours[2:]) & set(theirs[2:])


def test_salts_share_nothing() -> None:
    assert not set(told("mine")) & set(told("yours"))


def test_adapters_share_nothing() -> None:
    names = [
        PromptBlocks(PROMPT, salt, lora).chain(SIZE)
        for salt, lora in (("", ""), ("", "french"), ("french", ""), ("french", "french"))
    ]
    assert len({name for chain_ in names for name in chain_}) == 4 * 4


def test_a_chain_can_be_gone_on_with_from_any_block() -> None:
    begun = extend(root("", ""), PROMPT[:SIZE], SIZE)
    assert begun + extend(begun[-1], PROMPT[SIZE:], SIZE) == told()


@pytest.mark.parametrize(("length", "reusable"), [(0, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_last_token_of_a_prompt_is_computed_in_any_case(length: int, reusable: int) -> None:
    assert len(PromptBlocks(tuple(range(length)), "").reusable(SIZE)) == reusable


# A worker that tells nothing, and what saves anything at all.


def test_leading_blocks_alone_save_anything() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 10 * SIZE)
    cache.apply(told()[1:], [])
    assert tokens(index, cache) == [0]
    cache.apply(told()[:1], [])
    assert tokens(index, cache) == [4 * SIZE]


def test_a_full_cache_forgets_what_was_used_least_recently() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 8 * SIZE)
    for salt in ("1", "2", "1", "3"):
        cache.expect(blocks(salt=salt))
    assert [tokens(index, cache, salt=salt)[0] // SIZE for salt in ("1", "2", "3")] == [4, 0, 4]
    assert len(cache) == 8


def test_a_full_cache_keeps_the_beginning_of_a_prompt() -> None:
    """The rest would be of no use without it."""
    index = PrefixIndex()
    cache = index.join(SIZE, 3 * SIZE)
    cache.expect(blocks())
    assert tokens(index, cache) == [3 * SIZE]


def test_a_cache_without_room_holds_nothing() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, SIZE - 1)
    cache.expect(blocks())
    assert tokens(index, cache) == [0]


# A worker that tells.


def test_what_was_told_to_be_gone_saves_nothing() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 100 * SIZE)
    cache.apply(told(), [])
    cache.apply([], told()[2:])
    assert tokens(index, cache) == [2 * SIZE]
    assert len(cache) == 2


def test_what_is_expected_bridges_the_time_until_it_is_told() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 100 * SIZE)
    cache.expect(blocks())
    assert tokens(index, cache) == [4 * SIZE]
    cache.apply(told()[:3], [])
    for _ in range(AGES_TO_CONFIRM - 1):
        cache.grow_older()
    assert tokens(index, cache) == [4 * SIZE]
    cache.grow_older()
    assert tokens(index, cache) == [3 * SIZE], "the fourth was not confirmed"


def test_what_was_told_is_not_dropped_for_being_expected_again() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 100 * SIZE)
    cache.apply(told(), [])
    cache.expect(blocks())
    for _ in range(AGES_TO_CONFIRM):
        cache.grow_older()
    assert tokens(index, cache) == [4 * SIZE]


def test_a_worker_that_begins_anew_is_believed_anew() -> None:
    index = PrefixIndex()
    cache = index.join(SIZE, 100 * SIZE)
    cache.apply(told(), [])
    cache.forget()
    assert (tokens(index, cache), len(cache)) == ([0], 0)
    cache.apply(told()[:1], [])
    assert tokens(index, cache) == [SIZE]


# Several workers.


def test_each_worker_is_told_apart_and_may_have_blocks_of_its_own_size() -> None:
    index = PrefixIndex()
    one, two, small, none = (index.join(size, 10_000) for size in (SIZE, SIZE, 16, SIZE))
    one.apply(told(), [])
    two.apply(told()[:2], [])
    small.apply(told(size=16)[:3], [])
    assert tokens(index, one, two, small, none) == [4 * SIZE, 2 * SIZE, 3 * 16, 0]
    assert tokens(index, two) == [2 * SIZE]


def test_one_that_leaves_takes_its_blocks_alone_and_its_place_is_given_away() -> None:
    index = PrefixIndex()
    one, two = index.join(SIZE, 10_000), index.join(SIZE, 10_000)
    one.apply(told(), [])
    one.expect(blocks(salt="expected"))
    two.apply(told(), [])
    one.leave()
    heir = index.join(SIZE, 10_000)
    assert heir.bit == one.bit
    assert tokens(index, heir, two) == [0, 4 * SIZE]
    assert tokens(index, heir, salt="expected") == [0]
    two.leave()
    assert not index._holders


def test_beliefs_are_those_of_plain_sets_whatever_is_told() -> None:
    """Against a model of one set a worker, over a few thousand random reports."""
    random = Random(7)
    index = PrefixIndex()
    caches = [index.join(SIZE, 10_000) for _ in range(5)]
    truth: list[set[int]] = [set() for _ in caches]
    names = [name for salt in range(40) for name in told(str(salt))]
    for _ in range(3_000):
        which = random.randrange(len(caches))
        added, removed = random.sample(names, 6), random.sample(names, 6)
        if random.random() < 0.02:
            caches[which].forget()
            truth[which].clear()
        caches[which].apply(added, removed)
        truth[which] = (truth[which] | set(added)) - set(removed)
    assert [len(cache) for cache in caches] == [len(held) for held in truth]
    for salt in range(40):
        asked = blocks(salt=str(salt)).reusable(SIZE)
        expected = [
            SIZE * next((n for n, name in enumerate(asked) if name not in held), len(asked))
            for held in truth
        ]
        assert index.cached_tokens(blocks(salt=str(salt)), caches) == expected
    for before, after in pairwise(caches):
        assert before.bit != after.bit
