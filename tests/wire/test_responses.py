"""OpenAI's Responses on a real socket: the official client, and its types for every event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdserve.chat import ChatMessage
from pdserve.errors import DecodeError, ErrorReason, RejectedError
from pdserve.sampling import TokenLogprob
from pdserve.structured import JsonSchema
from pdserve.types import ChatPrompt, Delta, FinishReason, Truncation, Usage
from tests.support.fake_dispatch import MODEL, answer
from tests.support.http_facade import HttpFacade, assert_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
ASKED = {"model": MODEL, "input": "Hi"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object"}


@pytest_asyncio.fixture(loop_scope="module")
async def client(facade: HttpFacade) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{facade.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def ask(facade: HttpFacade, **fields: Any) -> httpx.Response:
    return await facade.client.post(PATH, json={**ASKED, **fields})


async def streamed(facade: HttpFacade, **fields: Any) -> list[dict[str, Any]]:
    """Every event, held against the official types."""
    response = await ask(facade, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


async def test_whole(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    facade.dispatcher.script = answer("Hello", " world", cached=3)
    done = await client.responses.create(
        model=MODEL,
        input="Hi",
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        store=False,
        extra_body={"top_k": 4, "stop": "x"},
    )
    Response.model_validate(done.model_dump(warnings=False))
    assert (done.output_text, done.status) == ("Hello world", "completed")
    assert (done.instructions, done.max_output_tokens) == ("Be brief.", 5)
    assert (done.temperature, done.top_p, done.metadata) == (0.5, 0.9, {"a": "b"})
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (7, 2, 9)
    assert done.usage.input_tokens_details.cached_tokens == 3
    spec = facade.dispatcher.seen[0].spec
    assert spec.prompt == ChatPrompt(
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    )
    assert (spec.sampling.max_tokens, spec.sampling.top_k, spec.sampling.stop) == (5, 4, ("x",))
    assert done.id == f"resp_{spec.request_id}"
    assert facade.dispatcher.seen[0].record.operation == "responses"


async def test_the_events_build_up_what_the_whole_would_be(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("Hel", "", "lo", cached=3)
    events = await streamed(facade, metadata={"a": "b"})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo"]
    facade.dispatcher.script = answer("Hel", "", "lo", cached=3)
    whole = (await ask(facade, metadata={"a": "b"})).json()
    last = events[-1]["response"]
    assert [one["content"] for one in last["output"]] == [one["content"] for one in whole["output"]]
    for response in (last, whole):
        for name in ("id", "created_at", "output"):
            response.pop(name)
    assert last == whole


async def test_the_official_client_follows_a_stream(
    facade: HttpFacade, client: openai.AsyncOpenAI
) -> None:
    facade.dispatcher.script = answer("Hel", "lo", finish=FinishReason.LENGTH)
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        texts = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
    assert texts == ["Hel", "lo"]
    facade.dispatcher.script = answer("Hel", "lo", finish=FinishReason.LENGTH)
    done = await client.responses.create(model=MODEL, input="Hi")
    assert done.status == "incomplete"
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"


async def test_an_answer_is_sent_back_as_it_was(
    facade: HttpFacade, client: openai.AsyncOpenAI
) -> None:
    first = await client.responses.create(model=MODEL, input="Hi")
    given: list[Any] = [
        {"role": "user", "content": "Hi"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": "More"}]},
    ]
    await client.responses.create(model=MODEL, input=given, truncation="auto")
    spec = facade.dispatcher.seen[-1].spec
    assert spec.prompt == ChatPrompt(
        (
            ChatMessage("user", "Hi"),
            ChatMessage("assistant", "Hello world"),
            ChatMessage("user", "More"),
        )
    )
    assert spec.truncation == Truncation(-1)


async def test_reasoning_formats_and_an_answer_to_go_on_with(facade: HttpFacade) -> None:
    given = [
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": "He", "status": "incomplete"},
    ]
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    await ask(facade, input=given, text={"format": form}, reasoning={"effort": "low"})
    spec = facade.dispatcher.seen[-1].spec
    assert spec.prompt == ChatPrompt(
        (ChatMessage("user", "Hi"), ChatMessage("assistant", "He", reasoning="hm")),
        reasoning_effort="low",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert spec.sampling.structured_outputs == JsonSchema('{"type":"object"}')


async def test_logprobs(facade: HttpFacade) -> None:
    at = [(TokenLogprob(5, -0.5, "Hi", 1), TokenLogprob(6, -1.5, "Ho", 2))]
    facade.dispatcher.script = [
        Delta("Hi", [5], FinishReason.STOP, Usage(7, 1), logprobs=at),
    ]
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = await streamed(facade, **fields)
    shown = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}]
    shown = [{**shown[0], "top_logprobs": [dict(shown[0])]}]
    (delta,) = (event for event in events if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == shown
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == shown
    assert (await ask(facade, **fields)).json()["output"][0]["content"][0]["logprobs"] == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tool_choice"),  # without a parser
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1001}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_refused(facade: HttpFacade, fields: dict[str, Any], param: str) -> None:
    assert_error(await ask(facade, **fields), 400, "invalid_argument", param)
    assert not facade.dispatcher.seen


async def test_failures_before_and_after_the_first_token(facade: HttpFacade) -> None:
    facade.dispatcher.script = [RejectedError(ErrorReason.QUEUE_FULL, "full")]
    assert_error(await ask(facade, stream=True), 429, "queue_full", None)
    too_long = RejectedError(ErrorReason.CONTEXT_LENGTH_EXCEEDED, "long", param="messages")
    facade.dispatcher.script = [too_long]
    assert_error(await ask(facade), 400, "context_length_exceeded", "input")
    facade.dispatcher.script = [Delta("a"), DecodeError(ErrorReason.DECODE_FAILED, "lost")]
    *_, delta, failed = await streamed(facade)
    assert delta["delta"] == "a"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "decode_failed: lost"}
    assert facade.observer.ends[-1][1] == "decode_failed"
