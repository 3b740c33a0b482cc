from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.facade.constraints import MAX_CHARS
from coordinator.facade.validate import Limits, validate
from pdserve.chat import ChatMessage, Tool
from pdserve.errors import ErrorReason, RejectedError
from pdserve.structured import JsonSchema
from pdserve.types import (
    ChatPrompt,
    GenerateSpec,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

HI = (ChatMessage("user", "Hi"),)
LIMITS = Limits(context_length=1000, vocab_size=500)
SPEC = GenerateSpec("id", "tiny", TextPrompt("Hello"), SamplingParams())

LONG = '{"a": 1}' + " " * (MAX_CHARS - 8)


def with_tools(tool: Tool, count: int) -> ChatPrompt:
    return ChatPrompt(HI, tools=(tool,) * count)


def nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


GOOD: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 1000},
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": 0},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"seed": None},
    {"stop": ("x",) * 16},
    {"stop_token_ids": (0, 499)},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 1e9},
    {"max_tokens": 5, "min_tokens": 5},
    {"min_tokens": 1000},
    {"logprobs": 0},
    {"logprobs": 20},
    {"logit_bias": ((0, -100.0), (499, 100.0))},
    {"structured_outputs": JsonSchema("{}")},
]

BAD: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1001}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 2**31}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("stop", {"stop": ("x",) * 17}),
    ("stop", {"stop": ("x", "")}),
    ("stop_token_ids", {"stop_token_ids": (500,)}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("stop_token_ids", {"stop_token_ids": (1,) * 1025}),
    ("allowed_token_ids", {"allowed_token_ids": (500,)}),
    ("allowed_token_ids", {"allowed_token_ids": (1,) * 1025}),
    ("bad_words", {"bad_words": ("",)}),
    ("bad_words", {"bad_words": ("a",) * 129}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("logit_bias", {"logit_bias": ((500, 1.0),)}),
    ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
    ("logit_bias", {"logit_bias": ((1, 100.5),)}),
    ("logit_bias", {"logit_bias": ((1, math.nan),)}),
    ("logit_bias", {"logit_bias": tuple((1, 1.0) for _ in range(1025))}),
    ("structured_outputs", {"structured_outputs": JsonSchema("[]")}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("frequency_penalty", {"frequency_penalty": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"max_tokens": 5, "min_tokens": 6}),
    ("min_tokens", {"min_tokens": 1001}),
]


@pytest.mark.parametrize("sampling", GOOD)
def test_edges_are_within(sampling: dict[str, Any]) -> None:
    validate(replace(SPEC, sampling=SamplingParams(**sampling)), LIMITS, {})


def refused(spec: GenerateSpec, names: dict[str, str] | None = None) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        validate(spec, LIMITS, names or {})
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize(("param", "sampling"), BAD)
def test_beyond_the_edges(param: str, sampling: dict[str, Any]) -> None:
    error = refused(replace(SPEC, sampling=SamplingParams(**sampling)))
    assert error.param == param
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("prompt", {"prompt": TextPrompt("")}),
        ("prompt", {"prompt": TokenPrompt(())}),
        ("messages", {"prompt": ChatPrompt(())}),
        ("tools", {"prompt": with_tools(Tool("f", parameters=LONG), 5)}),
        ("tools", {"prompt": with_tools(Tool("f"), 129)}),
        ("tools.0", {"prompt": with_tools(Tool(""), 1)}),
        ("tools.0", {"prompt": with_tools(Tool("f", parameters="[]"), 1)}),
        ("tools.0", {"prompt": with_tools(Tool("f", parameters=LONG + " "), 1)}),
        (
            "messages.1.role",
            {"prompt": ChatPrompt((ChatMessage("user", "a"), ChatMessage("critic", "b")))},
        ),
        ("continue_final_message", {"prompt": ChatPrompt(HI, continue_final_message=True)}),
        ("template_kwargs", {"prompt": ChatPrompt(HI, template_kwargs={"chat_template": "x"})}),
        ("template_kwargs", {"prompt": ChatPrompt(HI, template_kwargs={"eos_token": "x"})}),
        ("template_kwargs", {"prompt": ChatPrompt(HI, template_kwargs={"a": "x" * 65536})}),
        ("template_kwargs", {"prompt": ChatPrompt(HI, template_kwargs={"a": nested(5000)})}),
        ("truncate_prompt_tokens", {"truncation": Truncation(0)}),
        ("truncate_prompt_tokens", {"truncation": Truncation(-2)}),
        ("truncate_prompt_tokens", {"truncation": Truncation(1001)}),
        ("session", {"session": "x" * 257}),
        ("cache_salt", {"cache_salt": "x" * 257}),
    ],
)
def test_the_rest_of_the_spec(param: str, change: dict[str, Any]) -> None:
    assert refused(replace(SPEC, **change)).param == param


def test_prompts_within_their_bounds() -> None:
    goes_on = ChatPrompt(
        HI,
        add_generation_prompt=False,
        continue_final_message=True,
        template_kwargs={"a": [1, None]},
    )
    for tokens in (-1, 1, 1000):
        validate(replace(SPEC, prompt=goes_on, truncation=Truncation(tokens)), LIMITS, {})


def test_labels_may_be_256_characters_long() -> None:
    validate(replace(SPEC, session="x" * 256, cache_salt="x" * 256), LIMITS, {})


def test_fields_go_by_the_names_of_the_facade() -> None:
    spec = replace(SPEC, sampling=SamplingParams(top_p=2.0))
    error = refused(spec, {"top_p": "sampling.top_p"})
    assert error.param == "sampling.top_p"
    assert error.message == "sampling.top_p must be above 0 and at most 1"
