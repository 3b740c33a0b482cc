from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.facade.openai_schema import ChatCompletionRequest, CompletionRequest, parse
from pdserve.chat import ChatMessage, NamedTool, Tool, ToolCall, ToolMode
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import ChatPrompt, SamplingParams, TextPrompt, TokenPrompt, Truncation

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())


def test_defaults_are_those_of_openai_and_vllm() -> None:
    assert chat().to_sampling() == SamplingParams()
    assert completion().to_sampling() == SamplingParams(max_tokens=16)
    assert not chat().stream
    assert not chat().include_usage


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 4,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["c"],
        "allowed_token_ids": [3],
        "prompt_logprobs": 1,
    }
    lists = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
    expected = SamplingParams(**{**fields, **{name: tuple(fields[name]) for name in lists}})
    assert chat(**fields).to_sampling() == expected
    assert completion(**fields).to_sampling() == expected


def test_other_spellings() -> None:
    assert chat(stop="x").to_sampling().stop == ("x",)
    assert chat(stop="").to_sampling().stop == ("",)  # to be refused by its range
    assert chat(top_k=-1).to_sampling().top_k == 0
    assert chat(max_completion_tokens=5).to_sampling().max_tokens == 5
    assert chat(max_completion_tokens=5).param_names["max_tokens"] == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5).to_sampling().max_tokens == 5


OPTIONAL_CHAT = sorted(set(ChatCompletionRequest.__struct_fields__) - {"model", "messages"})
OPTIONAL_COMPLETION = sorted(set(CompletionRequest.__struct_fields__) - {"model", "prompt"})


def test_logprobs_of_chats_and_of_completions() -> None:
    assert chat(logprobs=True).to_sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).to_sampling().logprobs == 3
    assert chat(logprobs=False).to_sampling().logprobs is None
    assert completion(logprobs=0).to_sampling().logprobs == 0
    assert completion(logprobs=3).to_sampling().logprobs == 3
    assert chat(logprobs=True).param_names["logprobs"] == "top_logprobs"


def test_usage_so_far_is_told_where_usage_is() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).continuous_usage
    one = {"continuous_usage_stats": True}  # asks for nothing, as in vLLM
    assert not chat(stream=True, stream_options=one).continuous_usage


def test_logit_bias_is_by_token_id() -> None:
    assert chat(logit_bias={"7": -1.5, "5": 1}).to_sampling().logit_bias == ((5, 1.0), (7, -1.5))


def test_null_is_not_given() -> None:
    assert chat(**dict.fromkeys(OPTIONAL_CHAT)) == chat()
    assert completion(**dict.fromkeys(OPTIONAL_COMPLETION)) == completion()


def test_inert_fields() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"logprobs": False, "top_logprobs": 0},
        {"stream": True, "stream_options": {"continuous_usage_stats": False}},
    ],
)
def test_values_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    chat(**fields)


def test_completion_values_that_ask_for_nothing() -> None:
    completion(best_of=1, echo=False, suffix="", logprobs=None)


def test_roles_and_parts() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": ""},
            {
                "role": "user",
                "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
            },
        ]
    )
    assert body.to_prompts() == [
        ChatPrompt(
            (
                ChatMessage("system", "Be brief."),
                ChatMessage("user", "a", name="bob"),
                ChatMessage("assistant", ""),
                ChatMessage("user", "b\nc"),
            )
        )
    ]


def test_a_conversation_with_tools() -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "1"},
        {"role": "assistant", "content": "", "reasoning": "so", "reasoning_content": "old"},
    ]
    (prompt,) = chat(messages=said).to_prompts()
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", '{"x": 1}'),), reasoning="hm"),
        ChatMessage("tool", "4", tool_call_id="1"),
        ChatMessage("assistant", "", reasoning="so"),
    )


def test_tools_and_whether_they_are_called() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
        {"type": "function", "function": {"name": "g", "description": "Does."}},
    ]

    def asked(**fields: Any) -> ChatPrompt:
        (prompt,) = chat(tools=tools, **fields).to_prompts()
        assert isinstance(prompt, ChatPrompt)
        return prompt

    text = '{"type":"object","properties":{"b":{},"a":{}}}'
    assert asked().tools == (Tool("f", None, text, strict=True), Tool("g", "Does."))
    assert asked().tool_choice is asked(tool_choice=None).tool_choice is ToolMode.AUTO
    assert asked(tool_choice="none").tool_choice is ToolMode.NONE
    assert asked(tool_choice="required").tool_choice is ToolMode.REQUIRED
    named = {"type": "function", "function": {"name": "g"}}
    assert asked(tool_choice=named).tool_choice == NamedTool("g")
    assert asked().parallel_tool_calls
    assert not asked(parallel_tool_calls=False).parallel_tool_calls
    assert not asked(include_reasoning=False).include_reasoning
    assert asked(reasoning_effort="low").reasoning_effort == "low"


def test_how_a_prompt_is_made() -> None:
    body = chat(
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
        truncate_prompt_tokens=-1,
        truncation_side="right",
    )
    (prompt,) = body.to_prompts()
    assert prompt == ChatPrompt(
        (ChatMessage("user", "Hi"),),
        add_generation_prompt=False,
        continue_final_message=True,
        template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
    )
    assert body.truncation == Truncation(-1, "right")
    assert chat(truncation_side="left").truncation is None
    (text,) = completion(add_special_tokens=False).to_prompts()
    assert text == TextPrompt("Hi", add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", TextPrompt("Hi")),
        (["Hi"], TextPrompt("Hi")),
        ([1, 2], TokenPrompt((1, 2))),
        ([[1, 2]], TokenPrompt((1, 2))),
        ("", TextPrompt("")),  # the empty ones are refused later
        ([], TokenPrompt(())),
        ([[]], TokenPrompt(())),
    ],
)
def test_kinds_of_prompt(prompt: Any, expected: TextPrompt | TokenPrompt) -> None:
    assert completion(prompt=prompt).to_prompts() == [expected]


def test_several_prompts() -> None:
    assert completion(prompt=["a", "b"]).to_prompts() == [TextPrompt("a"), TextPrompt("b")]
    assert completion(prompt=[[1], [2, 3]]).to_prompts() == [TokenPrompt((1,)), TokenPrompt((2, 3))]
    assert completion(prompt=["a", [2]]).to_prompts() == [TextPrompt("a"), TokenPrompt((2,))]


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], 2]])
def test_prompts_and_token_ids_do_not_mix(prompt: Any) -> None:
    with pytest.raises(RejectedError) as caught:
        completion(prompt=prompt).to_prompts()
    assert caught.value.param == "prompt"


BAD_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 5}),
    ("model", {"model": None}),
    ("messages", {"messages": "Hi"}),
    ("messages", {"messages": None}),
    ("messages.0", {"messages": ["Hi"]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content", {"messages": [{"role": "assistant", "content": None}]}),
    ("messages.0.role", {"messages": [{"role": "critic", "content": "x"}]}),
    ("messages.0.tool_calls", {"messages": [{"role": "user", "tool_calls": [CALL]}]}),
    (
        "messages.0.tool_calls.0.function.arguments",
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f"}}]}]},
    ),
    ("messages.0.tool_call_id", {"messages": [{**MESSAGES[0], "tool_call_id": "1"}]}),
    ("messages.0.reasoning", {"messages": [{**MESSAGES[0], "reasoning": "hm"}]}),
    ("messages.0.refusal", {"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}),
    ("messages.1.role", {"messages": [*MESSAGES, {"content": "x"}]}),
    ("messages.0.nmae", {"messages": [{"role": "user", "content": "x", "nmae": "bob"}]}),
    ("messages.0.content.0", {"messages": [{"role": "user", "content": ["x"]}]}),
    (
        "messages.0.content.1.type",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "text": ""}],
                }
            ]
        },
    ),
    (
        "messages.0.content.0.text",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    ),
    ("max_token", {"max_token": 5}),
    ("kv_transfer_params", {"kv_transfer_params": {"remote_host": "10.0.0.1"}}),
    ("stream", {"stream": "yes"}),
    ("stream", {"stream": 1}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 5.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": 5}),
    ("stop.1", {"stop": ["a", 5]}),
    ("stop_token_ids.0", {"stop_token_ids": ["a"]}),
    ("metadata", {"metadata": "x"}),
    ("service_tier", {"service_tier": "flex"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": False, "stream_options": {}}),
    ("stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
    ("prompt_logprobs", {"stream": True, "prompt_logprobs": 1}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("bad_words.0", {"bad_words": [5]}),
    ("n", {"n": 129}),
    ("n", {"n": 0}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3, "logprobs": False}),
    ("logprobs", {"logprobs": 3}),
    ("tools", {"tools": []}),
    ("tools.0.type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
    ("tools.0.function.name", {"tools": [{"function": {}}]}),
    ("tools.0.function.parameters", {"tools": [{"function": {"name": "f", "parameters": "{}"}}]}),
    ("tool_choice", {"tool_choice": "any"}),
    ("tool_choice.function", {"tool_choice": {"type": "function"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
    ("reasoning_effort", {"reasoning_effort": "huge"}),
    ("include_reasoning", {"include_reasoning": "yes"}),
    ("response_format", {"response_format": "text"}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("logit_bias", {"logit_bias": {"5.5": 1}}),
]

BAD_COMPLETION: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": None}),
    ("prompt.0", {"prompt": [None]}),
    ("prompt.1.0", {"prompt": [[1], ["a"]]}),
    ("messages", {"messages": MESSAGES}),
    ("best_of", {"best_of": 2}),
    ("echo", {"echo": "yes"}),
    ("suffix", {"suffix": "x"}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"top_logprobs": 1}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHAT)
def test_bad_chat_names_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RejectedError) as caught:
        chat(**fields).to_prompts()
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(("param", "fields"), BAD_COMPLETION)
def test_bad_completion_names_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RejectedError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'{"model":"tiny","prompt":"a"} x',
        b'{"model":"tiny","prompt":"\xff"}',
        b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","prompt":"a\nb"}',
        b'{"model":"tiny","prompt":"a","temperature":NaN}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_object(data: bytes) -> None:
    with pytest.raises(RejectedError) as caught:
        parse(CompletionRequest, data)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.param is None


def test_deep_nesting() -> None:
    begin = b'{"model":"m","messages":[],"tools":[{"function":{"name":"f","parameters":{"a":'
    deep = begin + b"[" * 100_000 + b"]" * 100_000 + b"}}}]}"
    with pytest.raises(RejectedError, match="nested too deeply"):
        parse(ChatCompletionRequest, deep)


def test_numbers_beyond_all_bounds() -> None:
    digits = "1" + "0" * 5000
    for value in ("1e400", digits):
        data = json.dumps(COMPLETION)[:-1] + f', "temperature": {value}}}'
        with pytest.raises(RejectedError) as caught:
            parse(CompletionRequest, data.encode())
        assert caught.value.param == "temperature"
    assert completion(seed=2**70).seed == 2**70  # to be refused by its range


def test_what_a_client_sent_is_told_only_in_part() -> None:
    for fields in ({"x" * 10_000: 1}, {"service_tier": "x" * 10_000}):
        with pytest.raises(RejectedError) as caught:
            chat(**fields)
        assert len(caught.value.message) <= 300
        assert len(caught.value.param or "") <= 300
