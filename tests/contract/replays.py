"""An answer that goes on from its beginning, as another engine wrote it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.engine.base import Engine
from pdserve.replay import Replay
from pdserve.types import Delta, EngineRequest, FinishReason
from tests.contract.asking import Prompt, request, run, text_of, tokens_of


def resumed_at(asked: EngineRequest, whole: list[Delta], sent: int) -> EngineRequest:
    """The request for the rest of an answer of which so many tokens were sent."""
    given = tokens_of(whole)[:sent]
    chars = 0
    for delta in whole:
        sent -= len(delta.token_ids)
        if sent < 0:
            break
        chars += len(delta.text)
    return replace(asked, replay=Replay(tuple(given), chars)) if given else asked


async def check_continued(
    engine: Engine, asked: EngineRequest, whole: list[Delta], sent: int
) -> None:
    """The rest is that of the whole answer: text, tokens, end and counts."""
    again = resumed_at(asked, whole, sent)
    assert again.replay is not None
    rest = await run(engine, again)
    assert tokens_of(rest) == tokens_of(whole)[sent:]
    assert text_of(rest) == text_of(whole)[again.replay.num_chars :]
    assert rest[-1].finish_reason is whole[-1].finish_reason
    assert rest[-1].usage is not None
    assert whole[-1].usage is not None
    assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
    assert rest[0].timings is not None


class Replays:
    @pytest.mark.parametrize("sent", [1, 5, 14])
    async def test_an_answer_whose_beginning_is_replayed_goes_on_as_it_did(
        self, decode_engine: Engine, prompt: Prompt, sent: int
    ) -> None:
        asked = request(prompt, max_tokens=16)
        whole = await run(decode_engine, asked)
        await check_continued(decode_engine, asked, whole, sent)

    async def test_replayed_tokens_are_those_that_are_given(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        own = tokens_of(await run(decode_engine, request(prompt, max_tokens=6)))
        other = tuple(token + 1 for token in own[:3])
        asked = replace(request(prompt, max_tokens=6), replay=Replay(other, 0))
        read = request(prompt + other, max_tokens=3)
        expected = tokens_of(await run(decode_engine, read))
        assert tokens_of(await run(decode_engine, asked)) == expected

    @pytest.mark.parametrize("cut", [-2, 2])
    async def test_a_stop_string_is_met_across_what_is_replayed(
        self, decode_engine: Engine, prompt: Prompt, cut: int
    ) -> None:
        plain = await run(decode_engine, request(prompt, max_tokens=16))
        text = text_of(plain)
        middle = len(text) // 2
        asked = request(prompt, max_tokens=16, stop=(text[middle - 6 : middle + 6],))
        whole = await run(decode_engine, asked)
        assert whole[-1].finish_reason is FinishReason.STOP
        await check_continued(decode_engine, asked, whole, len(tokens_of(whole)) - abs(cut))

    @pytest.mark.parametrize(
        "sampling",
        [
            {"presence_penalty": 1.5},
            {"frequency_penalty": 1.5},
            {"repetition_penalty": 1.3},
            {"temperature": 1.0, "seed": 7},
            {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
            {"min_tokens": 12, "ignore_eos": False},
        ],
        ids=lambda sampling: next(iter(sampling)),
    )
    async def test_what_the_sampler_remembers_is_as_it_was(
        self, decode_engine: Engine, prompt: Prompt, sampling: dict[str, object]
    ) -> None:
        asked = request(prompt, max_tokens=16, **sampling)
        whole = await run(decode_engine, asked)
        await check_continued(decode_engine, asked, whole, 7)

    async def test_answers_are_replayed_beside_others(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        """Each with a token of its own, which is never in doubt: what others in a step are forced
        to would be seen, and what a batch does to logits is not."""
        own = list(range(20, 26))
        asked = [request(prompt, max_tokens=12, logit_bias=((token, 100.0),)) for token in own]
        wholes = await asyncio.gather(*(run(decode_engine, one) for one in asked))
        assert [tokens_of(whole) for whole in wholes] == [[token] * 12 for token in own]
        pairs = list(zip(asked, wholes, strict=True))
        resumed = [resumed_at(one, whole, 2 * i) for i, (one, whole) in enumerate(pairs)]
        rests = await asyncio.gather(*(run(decode_engine, one) for one in resumed))
        assert [tokens_of(rest) for rest in rests] == [
            [token] * (12 - 2 * i) for i, token in enumerate(own)
        ]
