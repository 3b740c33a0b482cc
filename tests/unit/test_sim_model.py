"""The invented answers of a simulated engine, and its prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.engine.sim_model import BLOCK_SIZE, EOS, Answer, PrefixCache
from pdserve.prefix import chain
from pdserve.types import (
    FinishReason,
    SamplingParams,
)


def answer_of(prompt: tuple[int, ...], **sampling: object) -> tuple[list[int], str, FinishReason]:
    params = replace(SamplingParams(max_tokens=400, temperature=0.0), **sampling)  # type: ignore[arg-type]
    answer = Answer(prompt, params, params.max_tokens or 0)
    tokens, text = [], ""
    while True:
        token, piece, finish = answer.next()
        tokens.append(token)
        text += piece
        if finish is not None:
            return tokens, text, finish


def test_some_answers_end_by_themselves_and_go_on_when_told() -> None:
    ends = [answer_of((prompt,)) for prompt in range(50)]
    stopped = [(tokens, text) for tokens, text, finish in ends if finish is FinishReason.STOP]
    assert 10 < len(stopped) < 50
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens, _ in stopped)
    ignoring = answer_of((0,), ignore_eos=True)
    assert (len(ignoring[0]), ignoring[2]) == (400, FinishReason.LENGTH)


def test_min_tokens_come_before_any_end() -> None:
    ends = [answer_of((prompt,), min_tokens=300) for prompt in range(20)]
    assert all(len(tokens) > 300 for tokens, _, _ in ends)


def test_only_sampling_with_a_seed_changes_the_answer() -> None:
    greedy = answer_of((1, 2))
    assert answer_of((1, 2), temperature=1.0) == greedy
    assert answer_of((1, 2), seed=7) == greedy
    sampled = answer_of((1, 2), temperature=1.0, seed=7)
    assert sampled != greedy
    assert answer_of((1, 2), temperature=1.0, seed=7) == sampled
    assert answer_of((1, 2), temperature=1.0, seed=8) != sampled


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stop_string_across_tokens_is_cut_and_never_shown(cut: int) -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    stop = whole[len(whole) // 2 :][: 3 * cut]
    tokens, text, finish = answer_of((5,), ignore_eos=True, max_tokens=30, stop=(stop,))
    assert finish is FinishReason.STOP
    assert text == whole[: whole.index(stop)]
    assert len(tokens) < 30


def test_held_back_text_comes_with_the_end() -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    stops = ("never there at all", whole[-6:] + "!")
    assert answer_of((5,), ignore_eos=True, max_tokens=30, stop=stops)[1] == whole


def test_stop_strings_inside_min_tokens_do_not_end_the_answer() -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    first = whole.split()[0]
    tokens, _, _ = answer_of((5,), ignore_eos=True, max_tokens=30, stop=(first,), min_tokens=10)
    assert len(tokens) > 10


def test_the_prefix_cache_finds_whole_blocks_but_never_the_last_token() -> None:
    cache = PrefixCache(1_000)
    prompt = tuple(range(96))
    whole = chain(prompt, "", BLOCK_SIZE)
    assert cache.lookup(whole, 96) == 0
    cache.insert(whole)
    assert cache.lookup(whole, 96) == 64
    assert cache.lookup(chain((*prompt, 1), "", BLOCK_SIZE), 97) == 96
    assert cache.lookup(chain((*prompt[:40], 7), "", BLOCK_SIZE), 41) == 32
    assert cache.lookup(chain(prompt, "salt", BLOCK_SIZE), 96) == 0


def test_the_prefix_cache_drops_what_was_used_longest_ago() -> None:
    cache = PrefixCache(64)
    one, two, three = (chain((n,) * 33, "", BLOCK_SIZE) for n in (1, 2, 3))
    cache.insert(one)
    cache.insert(two)
    assert cache.lookup(one, 33) == 32
    cache.insert(three)
    assert [cache.lookup(names, 33) for names in (one, two, three)] == [32, 0, 32]


def test_a_full_prefix_cache_keeps_the_beginning_of_a_prompt_and_tells_what_it_dropped() -> None:
    cache = PrefixCache(3 * BLOCK_SIZE)
    first = chain(tuple(range(96)), "", BLOCK_SIZE)
    second = chain(tuple(range(64)), "other", BLOCK_SIZE)
    cache.insert(first)
    cache.lookup(first, 97)
    cache.insert(second)
    assert cache.lookup(first, 97) == BLOCK_SIZE
    held = [block in cache.told for block in first + second]
    assert held == [True, False, False, True, True]
