"""Log probabilities, and biases of them."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from pdserve.engine.base import Engine
from pdserve.types import Delta, PositionLogprobs
from tests.contract.asking import LEASE_S, Prompt, request, run, tokens_of
from tests.support.prefilling import read


def positions_of(deltas: list[Delta]) -> list[PositionLogprobs]:
    """One for each token, whatever delta it came in."""
    for delta in deltas:
        assert len(delta.logprobs or ()) == len(delta.token_ids)
    return [position for delta in deltas for position in delta.logprobs or ()]


class Sampling:
    async def test_logprobs_come_with_their_tokens_and_change_none(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        prompt: Prompt,
        transport: str,
    ) -> None:
        plain = tokens_of(await run(decode_engine, request(prompt)))
        asked = request(prompt, logprobs=3)
        colocated = positions_of(await run(decode_engine, asked))
        assert [position[0].token_id for position in colocated] == plain
        for position in colocated:
            assert len(position) == 3
            assert [one.rank for one in position] == [1, 2, 3]
            chances = [one.logprob for one in position]
            assert chances == sorted(chances, reverse=True)
            assert sum(exp(chance) for chance in chances) <= 1.001

        salted = replace(asked, cache_salt=f"likely {transport}")
        prefilled = await read(prefill_engine, salted, transport, LEASE_S)
        handed = positions_of(await run(decode_engine, salted, prefilled.descriptor))
        await prefill_engine.release(prefilled.descriptor)
        assert [position[0].token_id for position in handed] == plain
        assert [position[0].logprob for position in handed] == pytest.approx(
            [position[0].logprob for position in colocated], abs=0.15
        )

    async def test_logprobs_of_a_prompt_are_of_each_token_but_the_first(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        await run(decode_engine, request(prompt))  # a cached prompt has them, too
        deltas = await run(decode_engine, request(prompt, prompt_logprobs=2))
        positions = [position for delta in deltas for position in delta.prompt_logprobs or ()]
        assert [position[0].token_id for position in positions] == list(prompt[1:])
        assert all(len(position) >= 2 for position in positions)
        assert tokens_of(deltas) == tokens_of(await run(decode_engine, request(prompt)))

    async def test_logprobs_of_the_tokens_alone(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        positions = positions_of(await run(decode_engine, request(prompt, logprobs=0)))
        assert [len(position) for position in positions] == [1] * 8

    async def test_a_bias_bans_a_token_and_makes_another_certain(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        first = tokens_of(await run(decode_engine, request(prompt)))[0]
        banned = await run(decode_engine, request(prompt, logit_bias=((first, -100.0),)))
        assert first not in tokens_of(banned)
        certain = await run(decode_engine, request(prompt, logit_bias=((5, 100.0),)))
        assert tokens_of(certain) == [5] * 8
