"""Which leading blocks two prompts share, and what an index of them remembers."""

from __future__ import annotations

from coordinator.policy.prefix import BLOCK_TOKENS, PrefixIndex, chain

PROMPT = tuple(range(4 * BLOCK_TOKENS + 5))


def test_a_chain_has_a_hash_for_each_full_block() -> None:
    assert len(chain(PROMPT, "")) == 4
    assert chain(PROMPT[: BLOCK_TOKENS - 1], "") == ()


def test_prompts_share_the_hashes_of_their_common_beginning() -> None:
    other = (*PROMPT[: 2 * BLOCK_TOKENS], 99, *PROMPT[2 * BLOCK_TOKENS + 1 :])
    ours, theirs = chain(PROMPT, ""), chain(other, "")
    assert ours[:2] == theirs[:2]
    assert not set(ours[2:]) & set(theirs[2:])


def test_salts_share_nothing() -> None:
    assert not set(chain(PROMPT, "mine")) & set(chain(PROMPT, "yours"))


def test_an_index_knows_leading_blocks_alone() -> None:
    index = PrefixIndex(max_blocks=10)
    hashes = chain(PROMPT, "")
    index.add(hashes[1:])
    assert index.cached_tokens(hashes) == 0
    index.add(hashes[:3])
    assert index.cached_tokens(hashes) == 4 * BLOCK_TOKENS


def test_a_full_index_forgets_what_was_used_least_recently() -> None:
    first, second, third = (chain(PROMPT, salt) for salt in ("1", "2", "3"))
    index = PrefixIndex(max_blocks=8)
    for hashes in (first, second, first, third):
        index.add(hashes)
    assert [index.cached_tokens(hashes) // BLOCK_TOKENS for hashes in (first, second, third)] == [
        4,
        0,
        4,
    ]


def test_a_full_index_keeps_the_beginning_of_a_prompt() -> None:
    """The rest would be of no use without it."""
    index = PrefixIndex(max_blocks=3)
    index.add(chain(PROMPT, ""))
    assert index.cached_tokens(chain(PROMPT, "")) == 3 * BLOCK_TOKENS


def test_an_index_without_room_knows_nothing() -> None:
    index = PrefixIndex(max_blocks=0)
    index.add(chain(PROMPT, ""))
    assert index.cached_tokens(chain(PROMPT, "")) == 0
