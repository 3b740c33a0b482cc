"""Tools and reasoning beside vLLM's own serving code, over recorded answers: what HTTP answers is
what vLLM's server would, and gRPC says the same."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.facade.openai_schema import ChatCompletionRequest, parse
from coordinator.gateway.keys import KeyRing
from coordinator.template import template_messages, template_tools
from pdserve.chat import ChatPrompt
from pdserve.config import ModelConfig
from pdserve.convert_chat import chat_to_proto
from pdserve.engine.vllm_chat import VllmChatParser
from pdserve.engine.vllm_sampling import structured_from_vllm
from pdserve.errors import ConfigError, DecodeError, ErrorReason
from pdserve.structured import Constraint, JsonSchema, StructuralTag
from pdserve.types import Delta, FinishReason, Usage
from pdserve.v1 import generation_pb2 as gen
from pdserve.v1 import inference_pb2 as pb
from tests.support.fake_dispatch import MODEL
from tests.support.grpc_facade import GrpcFacade, grpc_facade
from tests.support.http_facade import CHAT_PATH, HttpFacade, assert_error, http_facade
from tests.support.vllm_chat import PROMPT, Recorded, VllmServing, essence, model_with_marks

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "description": "Tells the time."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BOTH = f"Let me see.\n{WEATHER}\n{CLOCK}"
THOUGHT = "<think>\nTwo and two, hm.\n</think>\n\n"
LIST = (
    '[{"name": "weather", "parameters": {"city": "Par\\"is"}}, {"name": "clock", "parameters": {}}]'
)

Parsers = tuple[str | None, str | None]
HERMES: Parsers = ("hermes", None)
QWEN: Parsers = ("hermes", "qwen3")
R1: Parsers = (None, "deepseek_r1")
JSON: Parsers = ("llama3_json", None)
XLAM: Parsers = ("xlam", None)
CODER: Parsers = ("qwen3_coder", None)

CASES: list[tuple[Parsers, dict[str, Any], Recorded]] = [
    (HERMES, {"tools": TOOLS}, Recorded(BOTH)),
    (HERMES, {"tools": TOOLS}, Recorded(BOTH, size=5)),
    (HERMES, {"tools": TOOLS}, Recorded(BOTH, size=500)),
    (HERMES, {"tools": TOOLS}, Recorded("None of them helps.")),
    (HERMES, {"tools": TOOLS}, Recorded(BOTH[:-60], finish="length")),
    (HERMES, {"tools": TOOLS}, Recorded(BOTH, finish="length")),
    (HERMES, {"tools": TOOLS, "parallel_tool_calls": False}, Recorded(BOTH)),
    (HERMES, {"tools": TOOLS, "tool_choice": "none"}, Recorded(BOTH)),
    (HERMES, {"tools": TOOLS, "tool_choice": "required"}, Recorded(WEATHER)),
    (HERMES, {"tools": TOOLS, "tool_choice": "required"}, Recorded("No.")),
    (HERMES, {"tools": TOOLS, "tool_choice": NAMED}, Recorded(WEATHER)),
    (HERMES, {"tools": TOOLS, "tool_choice": NAMED}, Recorded(WEATHER[:30], finish="length")),
    (HERMES, {}, Recorded("Plain text.")),
    (HERMES, {}, Recorded(BOTH)),
    (CODER, {}, Recorded(BOTH)),
    (XLAM, {"tools": TOOLS, "tool_choice": "required"}, Recorded(LIST)),
    (XLAM, {"tools": TOOLS, "tool_choice": "required"}, Recorded(LIST, size=7)),
    (XLAM, {"tools": TOOLS, "tool_choice": NAMED}, Recorded('{"city": "Paris"}')),
    (JSON, {"tools": TOOLS}, Recorded('{"name": "weather", "parameters": {"city": "Rome"}}')),
    (QWEN, {"tools": TOOLS}, Recorded(THOUGHT + BOTH)),
    (QWEN, {"tools": TOOLS}, Recorded(THOUGHT + BOTH, size=4)),
    (QWEN, {"tools": TOOLS, "include_reasoning": False}, Recorded(THOUGHT + BOTH)),
    (QWEN, {"tools": TOOLS, "tool_choice": "required"}, Recorded(THOUGHT + WEATHER)),
    (QWEN, {}, Recorded(THOUGHT + "Four.")),
    (QWEN, {}, Recorded(THOUGHT[:20], finish="length")),
    (QWEN, {"reasoning_effort": "none"}, Recorded("Four.")),
    (QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, Recorded("Four.")),
    (R1, {}, Recorded("Two and two.</think>Four.")),
    (R1, {"include_reasoning": False}, Recorded("Two and two.</think>Four.")),
]


class Beside:
    """Both façades over a parser, and vLLM's own serving code with the same."""

    def __init__(self, vllm: VllmServing, http: HttpFacade, grpc: GrpcFacade) -> None:
        self.vllm = vllm
        self.http = http
        self.grpc = grpc

    def script(self, recorded: Recorded) -> None:
        pieces = recorded.pieces(self.vllm.tokenizer)
        deltas = [Delta(text, list(ids)) for text, ids in pieces]
        deltas[-1].finish_reason = FinishReason(recorded.finish)
        deltas[-1].usage = Usage(len(PROMPT), sum(len(ids) for _, ids in pieces))
        for facade in (self.http, self.grpc):
            facade.dispatcher.script = list(deltas)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_marks(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def made(folder: Path) -> Callable[[Parsers], tuple[VllmChatParser, VllmServing]]:
    @cache
    def make(parsers: Parsers) -> tuple[VllmChatParser, VllmServing]:
        config = ModelConfig(name=MODEL, tool_parser=parsers[0], reasoning_parser=parsers[1])
        parser = VllmChatParser(config, folder)
        return parser, VllmServing(config, parser.tokenizer)

    return make


@pytest.fixture
async def beside(
    request: pytest.FixtureRequest, made: Callable[[Parsers], tuple[VllmChatParser, VllmServing]]
) -> AsyncIterator[Beside]:
    parser, vllm = made(request.param)
    async with (
        http_facade(parser=parser) as http,
        grpc_facade(KeyRing.open_to_all(), parser) as grpc,
    ):
        yield Beside(vllm, http, grpc)


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def chat_request(body: dict[str, Any]) -> pb.ChatRequest:
    (prompt,) = parse(ChatCompletionRequest, json.dumps(body).encode()).to_prompts()
    assert isinstance(prompt, ChatPrompt)
    asked = chat_to_proto(prompt)
    asked.model = body["model"]
    return asked


USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("beside", "asked"), [(one[0], one[1:]) for one in CASES], indirect=["beside"]
)
async def test_answers_are_those_of_vllms_server(
    beside: Beside, asked: tuple[dict[str, Any], Recorded]
) -> None:
    fields, recorded = asked
    beside.script(recorded)
    whole, _ = await beside.vllm.answer(body_of(fields), recorded)
    response = await beside.http.client.post(CHAT_PATH, json=body_of(fields))
    assert essence(response.json()) == essence(whole)
    told = await beside.grpc.stub.Chat(chat_request(body_of(fields)))
    assert of_message(told) == of_choice(whole)

    streamed = body_of(fields) | {"stream": True, "stream_options": USAGE}
    chunks, _ = await beside.vllm.answer(streamed, recorded)
    assert essence(await events(beside.http, streamed)) == essence(chunks)
    call = beside.grpc.stub.ChatStream(pb.ChatStreamRequest(request=chat_request(body_of(fields))))
    assert joined_messages([message async for message in call]) == joined_chunks(chunks)


@pytest.mark.parametrize(
    ("beside", "fields", "forwards"),
    [
        (HERMES, {}, True),
        (HERMES, {"tools": TOOLS, "tool_choice": "none"}, True),
        (HERMES, {"tools": TOOLS}, False),
        (HERMES, {"include_reasoning": False}, False),
        (QWEN, {}, False),
        (CODER, {}, False),  # takes markup away, whatever was asked
    ],
    indirect=["beside"],
)
async def test_what_is_text_alone_is_forwarded_unparsed(
    beside: Beside, fields: dict[str, Any], forwards: bool
) -> None:
    beside.script(Recorded("Plain text."))
    await events(beside.http, body_of(fields) | {"stream": True})
    assert beside.http.dispatcher.streams[-1].forwards is forwards


async def events(http: HttpFacade, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await http.client.post(CHAT_PATH, json=body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


FINISH = {
    gen.FINISH_REASON_STOP: "stop",
    gen.FINISH_REASON_LENGTH: "length",
    gen.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
Told = tuple[str, str, list[tuple[str, str]], str, int | None]
"""Content, reasoning, calls by name and arguments, finish reason, reasoning tokens."""


def of_message(told: pb.ChatResponse) -> Told:
    calls = [(call.name, call.arguments) for call in told.message.tool_calls]
    return (
        told.message.content,
        told.message.reasoning,
        calls,
        FINISH[told.finish_reason],
        told.usage.reasoning_tokens if told.usage.HasField("reasoning_tokens") else None,
    )


def of_choice(answer: dict[str, Any]) -> Told:
    (choice,) = answer["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return (
        message["content"] or "",
        message["reasoning"] or "",
        [(one["name"], one["arguments"]) for one in functions],
        choice["finish_reason"],
        (answer["usage"].get("completion_tokens_details") or {}).get("reasoning_tokens"),
    )


def joined_messages(messages: list[pb.ChatStreamResponse]) -> Told:
    calls = [(one.index, one.name, one.arguments) for each in messages for one in each.tool_calls]
    usage = messages[-1].usage
    return (
        "".join(one.text for one in messages),
        "".join(one.reasoning for one in messages),
        joined_calls(calls),
        FINISH[messages[-1].finish_reason],
        usage.reasoning_tokens if usage.HasField("reasoning_tokens") else None,
    )


def joined_chunks(chunks: list[dict[str, Any]]) -> Told:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = [
        (one["index"], one["function"].get("name") or "", one["function"].get("arguments") or "")
        for delta in deltas
        for one in delta.get("tool_calls", ())
    ]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning") or "" for delta in deltas),
        joined_calls(calls),
        choices[-1]["finish_reason"],
        (chunks[-1]["usage"].get("completion_tokens_details") or {}).get("reasoning_tokens"),
    )


def joined_calls(pieces: list[tuple[int, str, str]]) -> list[tuple[str, str]]:
    return [
        ("".join(name for _, name, _ in parts), "".join(text for *_, text in parts))
        for parts in (list(group) for _, group in groupby(pieces, key=lambda piece: piece[0]))
    ]


@pytest.mark.parametrize(
    ("beside", "asked"), [(one[0], one[1:]) for one in CASES[::4]], indirect=["beside"]
)
async def test_several_choices_are_each_taken_apart(
    beside: Beside, asked: tuple[dict[str, Any], Recorded]
) -> None:
    fields, recorded = asked
    beside.script(recorded)
    whole, _ = await beside.vllm.answer(body_of(fields), recorded)
    response = await beside.http.client.post(CHAT_PATH, json=body_of(fields) | {"n": 2})
    answer = response.json()
    for index, choice in enumerate(answer["choices"]):
        assert essence(choice) == essence(whole["choices"][0]) | {"index": index}
    details = whole["usage"]["completion_tokens_details"]
    if details is not None:
        both = 2 * details["reasoning_tokens"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == both

    streamed = body_of(fields) | {"stream": True, "stream_options": USAGE}
    chunks = await events(beside.http, streamed | {"n": 2})
    (alone, _) = await beside.vllm.answer(streamed, recorded)
    for index in range(2):
        of_one = [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert joined_chunks([*of_one, alone[-1]]) == joined_chunks(alone)


@pytest.mark.parametrize("beside", [HERMES, QWEN, XLAM], indirect=True)
@pytest.mark.parametrize("choice", ["none", "auto", "required", NAMED])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parallel_tool_calls": False},
        {"include_reasoning": False},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}},
    ],
)
async def test_answers_are_held_to_what_vllms_server_would_hold_them_to(
    beside: Beside, choice: Any, more: dict[str, Any]
) -> None:
    recorded = Recorded("No.")
    beside.script(recorded)
    body = body_of({"tools": TOOLS, "tool_choice": choice, **more})
    _, request = await beside.vllm.answer(body, recorded)
    assert (await beside.http.client.post(CHAT_PATH, json=body)).status_code == 200
    sampling = beside.http.dispatcher.seen[-1].spec.sampling
    held = request.extract_structured_outputs()
    expected = None if held is None else structured_from_vllm(held)
    assert as_json(sampling.structured_outputs) == as_json(expected)
    assert sampling.skip_special_tokens == request.skip_special_tokens
    assert sampling.constrain_reasoning is (request.resolve_reasoning_ended(None, []) is True)


@pytest.mark.parametrize("beside", [HERMES], indirect=True)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_an_engine_that_cannot_hold_an_answer_names_what_asked_for_it(
    beside: Beside, fields: dict[str, Any], param: str
) -> None:
    refusal = DecodeError(ErrorReason.INVALID_ARGUMENT, "unknown here", param="structured_outputs")
    beside.http.dispatcher.refusals.append(refusal)
    response = await beside.http.client.post(CHAT_PATH, json=body_of(fields))
    assert_error(response, 400, "invalid_argument", param)


def as_json(constraint: Constraint | None) -> Any:
    """However its JSON was written."""
    match constraint:
        case JsonSchema(text) | StructuralTag(text):
            return type(constraint), json.loads(text)
        case _:
            return constraint


TEXT = {"type": "text", "text": "Be brief."}
HISTORY = [
    {"role": "system", "content": [TEXT, TEXT]},
    {"role": "user", "name": "bob", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Call.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            for arguments in ('{"city": "Paris", "days": 1.0}', "", "[]", '{"city": "Par')
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    {"role": "tool", "tool_call_id": "2", "content": ""},
    {"role": "assistant", "content": "Sunny.", "reasoning": "Tell."},
]


def test_conversations_are_rendered_as_vllms_server_renders_them() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as Theirs
    from vllm.renderers.chat_utils import parse_chat_messages

    body = body_of({"messages": HISTORY, "tools": TOOLS})
    theirs = Theirs.model_validate(json.loads(json.dumps(body)))
    model = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    conversation, *_ = parse_chat_messages(theirs.messages, model, "string")
    (ours,) = parse(ChatCompletionRequest, json.dumps(body).encode()).to_prompts()
    assert isinstance(ours, ChatPrompt)
    assert template_messages(ours.messages) == conversation
    assert theirs.tools is not None
    told = template_tools(ours.tools)
    assert json.dumps(told) == json.dumps([tool.model_dump() for tool in theirs.tools])


@pytest.mark.parametrize(
    ("setting", "name", "known"),
    [
        ("tool_parser", "no_such", ", hermes, "),
        ("reasoning_parser", "no_such", ", qwen3, "),
        ("tool_parser", "openai", ", hermes, "),  # vLLM's, but of no use with a chat template
    ],
)
def test_a_parser_that_there_is_not(folder: Path, setting: str, name: str, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VllmChatParser(ModelConfig(name=MODEL, **{setting: name}), folder)
    said = str(caught.value)
    assert said.startswith(f"model tiny: no {setting} {name!r}: use ")
    assert known in said
    assert "\n" not in said


def test_without_vllm_a_parser_is_refused_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.parser.parser_manager", None)
    with pytest.raises(ConfigError, match="which is not installed with the coordinator"):
        VllmChatParser(ModelConfig(name=MODEL, tool_parser="hermes"), folder)
