"""What a model thought, in Responses and in Messages: a part of the answer by itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pdserve.chat import AnsweredMessage, ChatPrompt, MessageDelta
from pdserve.types import FinishReason, SamplingParams
from tests.support.fake_dispatch import MODEL, answer
from tests.support.http_facade import HttpFacade, http_facade

pytestmark = pytest.mark.asyncio(loop_scope="module")

END = "</think>"
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9},
}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Thinking:
    """A ChatParser, its ChatParsing and its AnswerParser: reasoning is all up to END."""

    parses_tools = False
    parses_reasoning = True

    def __init__(self, sampling: SamplingParams | None = None) -> None:
        self.sampling = sampling or SamplingParams()
        self._thinks = True

    def takes_apart(self, prompt: ChatPrompt) -> bool:
        return True

    def read(self, prompt: ChatPrompt, sampling: SamplingParams) -> Thinking:
        return Thinking(sampling)

    def parser(self, prompt_token_ids: Sequence[int]) -> Thinking:
        return Thinking(self.sampling)

    def piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> MessageDelta | None:
        if text == END:
            self._thinks = False
            return None
        return MessageDelta(reasoning=text) if self._thinks else MessageDelta(content=text)

    def whole(self, text: str, token_ids: Sequence[int]) -> AnsweredMessage:
        thought, ended, said = text.partition(END)
        return AnsweredMessage(content=said if ended else None, reasoning=thought)

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return 2


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[HttpFacade]:
    async with http_facade(parser=Thinking()) as facade:
        yield facade


@pytest.fixture
def facade(running: HttpFacade) -> HttpFacade:
    running.reset()
    return running


async def whole(facade: HttpFacade, path: str) -> dict[str, Any]:
    answered: dict[str, Any] = (await facade.client.post(path, json=ASKED[path])).json()
    return answered


async def events(facade: HttpFacade, path: str) -> list[dict[str, Any]]:
    response = await facade.client.post(path, json={**ASKED[path], "stream": True})
    lines = (line for line in response.text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_an_item_of_a_response(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("h", "m", END, "Hel", "lo")
    answered = await whole(facade, "/v1/responses")
    Response.model_validate(answered)
    thought, said = answered["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert said["content"][0]["text"] == "Hello"
    assert answered["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    came = await events(facade, "/v1/responses")
    for event in came:
        RESPONSE_EVENT.validate_python(event)
    assert [event["type"].removeprefix("response.") for event in came] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in came if "output_index" in event] == [0] * 7 + [1] * 7
    built = came[-1]["response"]["output"]
    assert [item["content"] for item in built] == [thought["content"], said["content"]]
    assert [item["status"] for item in built] == ["completed", "completed"]


async def test_an_answer_that_ends_in_thought(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("h", "m", finish=FinishReason.LENGTH)
    answered = await whole(facade, "/v1/responses")
    last = (await events(facade, "/v1/responses"))[-1]
    for response in (answered, last["response"]):
        (thought,) = response["output"]
        assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
    (block,) = (await whole(facade, "/v1/messages"))["content"]
    assert (block["type"], block["thinking"]) == ("thinking", "hm")


async def test_a_block_of_a_message(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("h", "m", END, "Hel", "lo")
    answered = await whole(facade, "/v1/messages")
    Message.model_validate(answered)
    assert answered["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hello"},
    ]
    came = await events(facade, "/v1/messages")
    for event in came:
        MESSAGE_EVENT.validate_python(event)
    assert [(event["type"], event.get("index")) for event in came] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]
