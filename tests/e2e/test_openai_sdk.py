"""The official OpenAI SDK against the real fleet, on both routes."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.fleet import Fleet

pytestmark = pytest.mark.vllm

COUNT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from one to five."}]
MODES = pytest.mark.parametrize("mode", ["colocated", "disaggregated"])


@MODES
def test_chat(fleet: Fleet, mode: str) -> None:
    answer = fleet.openai.chat.completions.create(
        model=fleet.model,
        messages=COUNT,
        temperature=0,
        max_completion_tokens=64,
        extra_headers={"x-pdserve-mode": mode},
    )
    choice = answer.choices[0]
    assert "3" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@MODES
def test_chat_streamed_is_the_same_text_in_pieces(fleet: Fleet, mode: str) -> None:
    headers = {"x-pdserve-mode": mode}
    whole = fleet.openai.chat.completions.create(
        model=fleet.model, messages=COUNT, temperature=0, max_tokens=32, extra_headers=headers
    )
    pieces = list(
        fleet.openai.chat.completions.create(
            model=fleet.model,
            messages=COUNT,
            temperature=0,
            max_tokens=32,
            stream=True,
            extra_headers=headers,
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert len(pieces) > 5
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@MODES
def test_completion_ends_before_its_stop_string(fleet: Fleet, mode: str) -> None:
    answer = fleet.openai.completions.create(
        model=fleet.model,
        prompt="One, two, three, four, five, six,",
        temperature=0,
        max_tokens=32,
        stop=["nine"],
        extra_headers={"x-pdserve-mode": mode},
    )
    assert answer.choices[0].text.startswith(" seven, eight,")
    assert "nine" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


@MODES
def test_max_tokens_ends_with_length(fleet: Fleet, mode: str) -> None:
    answer = fleet.openai.completions.create(
        model=fleet.model, prompt="Once", max_tokens=3, extra_headers={"x-pdserve-mode": mode}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_models(fleet: Fleet) -> None:
    assert [model.id for model in fleet.openai.models.list()] == [fleet.model]


def test_errors_have_the_sdk_s_own_classes(fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        fleet.openai.chat.completions.create(model="no-such-model", messages=COUNT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        fleet.openai.chat.completions.create(model=fleet.model, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        fleet.openai.completions.create(model=fleet.model, prompt="word " * 9000)
    assert long.value.code == "context_length_exceeded"


def test_the_answer_says_its_way_and_names_no_address(fleet: Fleet) -> None:
    raw = fleet.openai.chat.completions.with_raw_response.create(
        model=fleet.model,
        messages=COUNT,
        max_tokens=1,
        extra_headers={"x-pdserve-mode": "disaggregated", "x-request-id": "my-own-id"},
    )
    assert raw.headers["x-pdserve-mode"] == "disaggregated"
    assert "asked for" in raw.headers["x-pdserve-reason"]
    assert raw.headers["x-request-id"] == "my-own-id"
    shown = raw.text + repr(raw.headers)
    for process, address in fleet.metrics_addresses.items():
        if process != "coordinator":
            assert address.rpartition(":")[2] not in shown
