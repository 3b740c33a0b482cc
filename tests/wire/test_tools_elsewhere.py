"""Tools in Responses and in Messages, with their official clients: what a chat answers to the same
question is what they answer, in their own shapes; and what they send back is what a chat would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdserve.chat import ChatMessage, ChatPrompt, NamedTool, Tool, ToolCall, ToolMode
from pdserve.config import ModelConfig
from pdserve.engine.vllm_chat import VllmChatParser
from pdserve.types import Delta, FinishReason, Usage
from tests.support.fake_dispatch import MODEL
from tests.support.http_facade import CHAT_PATH, HttpFacade, assert_error, http_facade
from tests.support.vllm_chat import PROMPT, Recorded, model_with_marks

pytestmark = pytest.mark.asyncio(loop_scope="module")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": CITY}
TOOL = Tool("weather", "Of a city.", json.dumps(CITY, separators=(",", ":")))
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"Let me see.\n{WEATHER}\n{WEATHER.replace('Paris', 'Rome')}"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": HI, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 9,
        "tools": [{"name": "weather", "description": "Of a city.", "input_schema": CITY}],
    },
}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> VllmChatParser:
    folder: Path = model_with_marks(tmp_path_factory.mktemp("marked"))
    return VllmChatParser(ModelConfig(name=MODEL, tool_parser="hermes"), folder)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(parser: VllmChatParser) -> AsyncIterator[HttpFacade]:
    async with http_facade(parser=parser) as facade:
        yield facade


@pytest.fixture(params=[1, 500], ids=["token by token", "at once"])
def facade(
    running: HttpFacade, parser: VllmChatParser, request: pytest.FixtureRequest
) -> HttpFacade:
    """The model answers ANSWER."""
    running.reset()
    pieces = Recorded(ANSWER, request.param).pieces(parser.tokenizer)
    deltas = [Delta(text, list(ids)) for text, ids in pieces]
    deltas[-1].finish_reason = FinishReason.STOP
    deltas[-1].usage = Usage(len(PROMPT), sum(len(ids) for _, ids in pieces))
    running.dispatcher.script = list(deltas)
    return running


@pytest_asyncio.fixture(loop_scope="module")
async def of_openai(facade: HttpFacade) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{facade.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def of_anthropic(facade: HttpFacade) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://{facade.address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def ask(facade: HttpFacade, path: str, **fields: Any) -> Any:
    return await facade.client.post(path, json={"model": MODEL, **ASKED[path], **fields})


async def events(facade: HttpFacade, path: str) -> list[dict[str, Any]]:
    response = await ask(facade, path, stream=True)
    lines = (line for line in response.text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def of_chat(facade: HttpFacade) -> tuple[str, list[tuple[str, str]]]:
    """What a chat is answered: the text, and the name and arguments of each call."""
    message = (await ask(facade, CHAT_PATH)).json()["choices"][0]["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert len(functions) == 2
    return message["content"], [(one["name"], one["arguments"]) for one in functions]


async def test_items_of_a_response(facade: HttpFacade, of_openai: openai.AsyncOpenAI) -> None:
    text, calls = await of_chat(facade)
    done = await of_openai.responses.create(model=MODEL, **ASKED["/v1/responses"])
    Response.model_validate(done.model_dump(warnings=False))
    said, *called = done.output
    assert said.type == "message"
    assert (done.output_text, done.status) == (text, "completed")
    assert [(call.name, call.arguments) for call in called if call.type == "function_call"] == calls
    assert len({item.id for item in done.output}) == 3
    assert (done.tool_choice, done.parallel_tool_calls) == ("auto", True)
    assert [tool.name for tool in done.tools if tool.type == "function"] == ["weather"]


async def test_the_events_of_a_response(facade: HttpFacade, of_openai: openai.AsyncOpenAI) -> None:
    whole = (await ask(facade, "/v1/responses")).json()
    came = await events(facade, "/v1/responses")
    for event in came:
        RESPONSE_EVENT.validate_python(event)
    built = came[-1]["response"]["output"]
    assert [essence(item) for item in built] == [essence(item) for item in whole["output"]]
    done = [event for event in came if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == built
    for index, item in enumerate(built[1:], start=1):
        deltas = [
            event["delta"]
            for event in came
            if event["type"] == "response.function_call_arguments.delta"
            and (event["output_index"], event["item_id"]) == (index, item["id"])
        ]
        assert "".join(deltas) == item["arguments"]
    async with of_openai.responses.stream(model=MODEL, **ASKED["/v1/responses"]) as stream:
        final = await stream.get_final_response()
    assert [essence(item.model_dump()) for item in final.output[1:]] == [
        essence(item) for item in built[1:]
    ]


def essence(item: dict[str, Any]) -> Any:
    if item["type"] == "message":
        return item["content"][0]["text"]
    return item["name"], json.loads(item["arguments"]), item["status"]


async def test_blocks_of_a_message(
    facade: HttpFacade, of_anthropic: anthropic.AsyncAnthropic
) -> None:
    text, calls = await of_chat(facade)
    done = await of_anthropic.messages.create(model=MODEL, **ASKED["/v1/messages"])
    Message.model_validate(done.model_dump(warnings=False))
    said, *called = done.content
    assert (said.type, done.stop_reason) == ("text", "tool_use")
    assert said.text == text
    assert [(one.name, one.input) for one in called if one.type == "tool_use"] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    async with of_anthropic.messages.stream(model=MODEL, **ASKED["/v1/messages"]) as stream:
        built = await stream.get_final_message()
    assert [block.model_dump(include={"type", "name", "input"}) for block in built.content] == [
        block.model_dump(include={"type", "name", "input"}) for block in done.content
    ]
    assert built.stop_reason == "tool_use"
    for event in await events(facade, "/v1/messages"):
        MESSAGE_EVENT.validate_python(event)


async def test_calls_and_their_results_are_sent_back(
    facade: HttpFacade,
    of_openai: openai.AsyncOpenAI,
    of_anthropic: anthropic.AsyncAnthropic,
) -> None:
    text, calls = await of_chat(facade)
    response = await of_openai.responses.create(model=MODEL, **ASKED["/v1/responses"])
    called = [item for item in response.output if item.type == "function_call"]
    given: list[Any] = [
        *HI,
        *(item.model_dump(exclude_none=True) for item in response.output),
        *(
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in called
        ),
    ]
    asked: dict[str, Any] = {**ASKED["/v1/responses"], "input": given}
    await of_openai.responses.create(model=MODEL, **asked)
    ids = [call.call_id for call in called]
    assert facade.dispatcher.seen[-1].spec.prompt == conversation(text, calls, ids, arguments=str)

    message = await of_anthropic.messages.create(model=MODEL, **ASKED["/v1/messages"])
    used = [block.id for block in message.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": used[0], "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": used[1],
            "content": [{"type": "text", "text": "sunny"}],
            "is_error": False,
        },
    ]
    turns: list[Any] = [
        *HI,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    asked = {**ASKED["/v1/messages"], "messages": turns}
    await of_anthropic.messages.create(model=MODEL, **asked)
    expected = conversation(text, calls, used, arguments=compact)
    assert facade.dispatcher.seen[-1].spec.prompt == expected


def compact(arguments: str) -> str:
    """Objects lose how they were written."""
    return json.dumps(json.loads(arguments), separators=(",", ":"))


def conversation(
    text: str, calls: list[tuple[str, str]], ids: list[str], arguments: Any
) -> ChatPrompt:
    called = tuple(
        ToolCall(id_, name, arguments(given)) for id_, (name, given) in zip(ids, calls, strict=True)
    )
    return ChatPrompt(
        (
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", text, tool_calls=called),
            *(ChatMessage("tool", "sunny", tool_call_id=id_) for id_ in ids),
        ),
        tools=(TOOL,),
        tool_choice=ToolMode.AUTO,
    )


@pytest.mark.parametrize(
    ("path", "fields", "choice", "parallel"),
    [
        ("/v1/responses", {}, ToolMode.AUTO, True),
        ("/v1/responses", {"tool_choice": "none"}, ToolMode.NONE, True),
        ("/v1/responses", {"tool_choice": "required"}, ToolMode.REQUIRED, True),
        (
            "/v1/responses",
            {"tool_choice": {"type": "function", "name": "weather"}},
            NamedTool("weather"),
            True,
        ),
        ("/v1/responses", {"parallel_tool_calls": False}, ToolMode.AUTO, False),
        ("/v1/messages", {"tool_choice": {"type": "auto"}}, ToolMode.AUTO, True),
        ("/v1/messages", {"tool_choice": {"type": "none"}}, ToolMode.NONE, True),
        (
            "/v1/messages",
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            ToolMode.REQUIRED,
            False,
        ),
        (
            "/v1/messages",
            {"tool_choice": {"type": "tool", "name": "weather"}},
            NamedTool("weather"),
            True,
        ),
    ],
)
async def test_which_tools_are_to_be_called(
    facade: HttpFacade, path: str, fields: dict[str, Any], choice: Any, parallel: bool
) -> None:
    answered = await ask(facade, path, **fields)
    assert answered.status_code == 200
    prompt = facade.dispatcher.seen[-1].spec.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, prompt.tool_choice) == ((TOOL,), choice)
    assert prompt.parallel_tool_calls is parallel
    if path == "/v1/messages":
        called = [one for one in answered.json()["content"] if one["type"] == "tool_use"]
    else:
        called = [one for one in answered.json()["output"] if one["type"] == "function_call"]
    calls = 0 if choice is ToolMode.NONE else 2
    assert len(called) == (calls if parallel else min(calls, 1))


USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
CALL = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/v1/responses", {"max_tool_calls": 1}, "max_tool_calls"),
        ("/v1/responses", {"input": [{**CALL, "call_id": None}]}, "input.0.call_id"),
        ("/v1/responses", {"input": [{**CALL, "role": "assistant"}]}, "input.0.role"),
        ("/v1/responses", {"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools.0"),
        ("/v1/messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [USE]}]},
            "messages.0.content.0",
        ),
        (
            "/v1/messages",
            {"messages": [*HI, {"role": "assistant", "content": [RESULT]}]},
            "messages.1.content.0",
        ),
    ],
)
async def test_what_is_refused(
    facade: HttpFacade, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await ask(facade, path, **fields)
    if path == "/v1/messages":
        assert response.status_code == 400
        assert param in response.json()["error"]["message"]
    else:
        assert_error(response, 400, "invalid_argument", param)
    assert not facade.dispatcher.seen


async def test_tokens_are_counted_as_of_the_same_chat(
    facade: HttpFacade, of_anthropic: anthropic.AsyncAnthropic
) -> None:
    asked = {name: ASKED["/v1/messages"][name] for name in ("messages", "tools")}
    counted = await of_anthropic.messages.count_tokens(model=MODEL, system="Be brief.", **asked)
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, *HI],
        "tools": ASKED[CHAT_PATH]["tools"],
    }
    same = (await facade.client.post("/tokenize", json={"model": MODEL, **chat})).json()
    assert counted.input_tokens == same["count"]
    with pytest.raises(anthropic.NotFoundError):
        await of_anthropic.messages.count_tokens(model="other", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await of_anthropic.messages.count_tokens(
            model=MODEL, messages=HI, extra_body={"max_tokens": 5}
        )


@pytest.mark.parametrize(
    ("text", "finish", "met", "shown"),
    [
        (ANSWER, FinishReason.STOP, "x", ("tool_use", None)),
        (ANSWER[:60], FinishReason.STOP, "x", ("stop_sequence", "x")),
        (ANSWER[:60], FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
async def test_a_call_that_was_cut_short_is_not_to_be_run(
    running: HttpFacade, text: str, finish: FinishReason, met: str | None, shown: Any
) -> None:
    running.reset()
    running.dispatcher.script = [Delta(text, [5], finish, Usage(7, 1), stop_reason=met)]
    whole = (await ask(running, "/v1/messages")).json()
    (end,) = (
        event["delta"]
        for event in await events(running, "/v1/messages")
        if event["type"] == "message_delta"
    )
    for told in (whole, end):
        assert (told["stop_reason"], told["stop_sequence"]) == shown


async def test_calls_and_text_of_one_answer_are_one_message(running: HttpFacade) -> None:
    running.reset()
    calls = [{**CALL, "call_id": id_} for id_ in ("1", "2")]
    said = {"type": "message", "role": "assistant", "content": "Let me see."}
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    called = tuple(ToolCall(id_, "weather", "{}") for id_ in ("1", "2"))
    for given in ([thought, said, *calls], [thought, *calls, said]):
        assert (await ask(running, "/v1/responses", input=[*HI, *given, *HI])).status_code == 200
        prompt = running.dispatcher.seen[-1].spec.prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages == (
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", "Let me see.", tool_calls=called, reasoning="hm"),
            ChatMessage("user", "Hi"),
        )
