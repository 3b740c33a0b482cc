"""What fits into the context, and what is cut to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.defaults import Defaults
from pdserve.chat import ChatMessage
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import ChatPrompt, Prompt, Role, TextPrompt, Truncation
from tests.support.core import CONTEXT_LENGTH, running
from tests.support.fake_worker import MODEL, decodes, pool
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_max_tokens_defaults_to_what_is_left_of_the_context() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        await core.ask("12345", max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == CONTEXT_LENGTH - 5


@on_virtual_time
async def test_a_model_may_have_a_longest_answer_for_those_who_name_none() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        model = core.models[MODEL]
        core.models[MODEL] = replace(model, defaults=Defaults(max_tokens=20))
        for asked, got in ((None, 20), (30, 30)):
            await core.ask("12345", max_tokens=asked)
            assert writer.requests[-1].sampling.max_tokens == got
        await core.ask("x" * (CONTEXT_LENGTH - 4), max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == 4


@on_virtual_time
async def test_the_worker_s_context_counts_where_it_is_shorter() -> None:
    (writer,) = pool(1, Role.DECODE, name="d", context_length=600)
    async with running(writer) as core:
        await core.ask("12345", max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == 595


@on_virtual_time
async def test_prompt_and_answer_may_fill_the_context() -> None:
    async with running(*decodes()) as core:
        await core.ask("12345", max_tokens=CONTEXT_LENGTH - 5)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (TextPrompt("12345"), CONTEXT_LENGTH - 4, "max_tokens"),
        (TextPrompt("x" * CONTEXT_LENGTH), None, "prompt"),
        (ChatPrompt((ChatMessage("user", "x" * CONTEXT_LENGTH),)), None, "messages"),
    ],
)
@on_virtual_time
async def test_what_cannot_fit_is_refused_with_the_field_at_fault(
    prompt: Prompt, max_tokens: int | None, param: str
) -> None:
    async with running(*decodes()) as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open(max_tokens=max_tokens, prompt=prompt)
        assert refusal.value.reason is ErrorReason.CONTEXT_LENGTH_EXCEEDED
        assert refusal.value.param == param
        assert str(CONTEXT_LENGTH) in refusal.value.message
        assert core.verbs == []


@on_virtual_time
async def test_an_answer_needs_at_least_one_token_of_room() -> None:
    async with running(*decodes()) as core:
        await core.ask("x" * (CONTEXT_LENGTH - 1), max_tokens=None)


@pytest.mark.parametrize(
    ("tokens", "kept", "answer"),
    [(4, 4, 50), (-1, CONTEXT_LENGTH - 1, 1), (CONTEXT_LENGTH - 10, CONTEXT_LENGTH - 10, 10)],
)
@on_virtual_time
async def test_a_prompt_is_cut_and_its_answer_gets_the_room_that_is_left(
    tokens: int, kept: int, answer: int
) -> None:
    (writer,) = decodes()
    prompt = TextPrompt("0" * CONTEXT_LENGTH + "1234")
    async with running(writer) as core:
        await core.ask(prompt=prompt, max_tokens=50, truncation=Truncation(tokens))
        request = writer.requests[-1]
        assert len(request.token_ids) == kept
        assert request.token_ids[-4:] == tuple(ord(digit) + 3 for digit in "1234")
        assert request.sampling.max_tokens == answer
