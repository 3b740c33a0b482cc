"""Anthropic's Messages on a real socket: the official client, and its types for every event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from coordinator.gateway.keys import KeyRing, new_key
from pdserve.chat import ChatMessage
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import ChatPrompt, Delta, FinishReason, Usage
from tests.support.fake_dispatch import MODEL, answer
from tests.support.http_facade import HttpFacade, http_facade

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, ENTRY = new_key("acme")
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED = {"model": MODEL, "messages": HI, "max_tokens": 9}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BEGUN = [*HI, {"role": "assistant", "content": "He"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[HttpFacade]:
    async with http_facade(keys=KeyRing([ENTRY])) as facade:
        facade.client.headers["x-api-key"] = KEY
        yield facade


@pytest.fixture
def facade(running: HttpFacade) -> HttpFacade:
    running.reset()
    return running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(running: HttpFacade) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://{running.address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


async def ask(facade: HttpFacade, **fields: Any) -> httpx.Response:
    return await facade.client.post("/v1/messages", json={**ASKED, **fields})


async def streamed(facade: HttpFacade, **fields: Any) -> list[dict[str, Any]]:
    """Every event but an error, held against the official types."""
    response = await ask(facade, stream=True, **fields)
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            EVENT.validate_python(event)
        events.append(event)
    return events


def assert_refused(response: httpx.Response, status: int, kind: str, words: str) -> None:
    body = response.json()
    assert response.status_code == status
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert words in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


async def test_whole(facade: HttpFacade, client: anthropic.AsyncAnthropic) -> None:
    facade.dispatcher.script = answer("Hello", " world", cached=3)
    done = await client.messages.create(
        model=MODEL,
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=HI,
        stop_sequences=["x"],
        metadata={"user_id": "bob"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 4},
    )
    Message.model_validate(done.model_dump(warnings=False))
    assert [block.text for block in done.content if block.type == "text"] == ["Hello world"]
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert (done.usage.input_tokens, done.usage.cache_read_input_tokens) == (4, 3)
    assert done.usage.output_tokens == 2
    seen = facade.dispatcher.seen[0]
    assert seen.spec.prompt == ChatPrompt(
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    )
    sampling = seen.spec.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.top_k) == (9, ("x",), 4)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (seen.record.operation, seen.record.tenant) == ("messages", "acme")
    assert done.id == f"msg_{seen.spec.request_id}"


async def test_the_events_build_up_what_the_whole_would_be(
    facade: HttpFacade, client: anthropic.AsyncAnthropic
) -> None:
    facade.dispatcher.script = answer("Hel", "", "lo", cached=3)
    events = await streamed(facade)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
        assert [text async for text in stream.text_stream] == ["Hel", "lo"]
        built = (await stream.get_final_message()).model_dump(exclude={"id"})
    whole = (await client.messages.create(model=MODEL, max_tokens=9, messages=HI)).model_dump()
    del whole["id"]
    for block in built["content"]:
        block.pop("parsed_output", None)
    assert built == whole


@pytest.mark.parametrize(
    ("reason", "met", "shown"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "\n\n", ("stop_sequence", "\n\n")),
        (FinishReason.STOP, 7, ("end_turn", None)),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
async def test_why_it_ended(
    facade: HttpFacade, reason: FinishReason, met: str | int | None, shown: tuple[str, str | None]
) -> None:
    facade.dispatcher.script = [Delta("a", [5], reason, Usage(7, 1), stop_reason=met)]
    whole = (await ask(facade)).json()
    delta = (await streamed(facade))[-2]["delta"]
    for told in (whole, delta):
        assert (told["stop_reason"], told["stop_sequence"]) == shown


async def test_an_answer_that_was_begun_is_gone_on_with(facade: HttpFacade) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    begun = {"role": "assistant", "content": [thought, {"type": "text", "text": "He"}]}
    await ask(facade, messages=[*HI, begun], thinking={"type": "disabled"})
    assert facade.dispatcher.seen[-1].spec.prompt == ChatPrompt(
        (ChatMessage("user", "Hi"), ChatMessage("assistant", "He", reasoning="hm")),
        reasoning_effort="none",
        add_generation_prompt=False,
        continue_final_message=True,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tool_choice"),  # without a parser
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"n": 2}, "n: "),
    ],
)
async def test_what_is_refused(facade: HttpFacade, fields: dict[str, Any], words: str) -> None:
    assert_refused(await ask(facade, **fields), 400, "invalid_request_error", words)
    assert not facade.dispatcher.seen


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RejectedError(ErrorReason.PERMISSION_DENIED, "no"), anthropic.PermissionDeniedError),
        (RejectedError(ErrorReason.MODEL_NOT_FOUND, "no"), anthropic.NotFoundError),
        (RejectedError(ErrorReason.QUEUE_FULL, "full"), anthropic.RateLimitError),
        (PdserveError(ErrorReason.NO_WORKER, "none"), anthropic.ServiceUnavailableError),
        (DecodeError(ErrorReason.DECODE_FAILED, "lost"), anthropic.InternalServerError),
    ],
)
async def test_errors_are_the_clients_own_classes(
    facade: HttpFacade,
    client: anthropic.AsyncAnthropic,
    error: PdserveError,
    kind: type[anthropic.APIStatusError],
) -> None:
    facade.dispatcher.script = [error]
    with pytest.raises(kind, match=error.message):
        await client.messages.create(model=MODEL, max_tokens=9, messages=HI)


async def test_keys_go_in_either_header(facade: HttpFacade) -> None:
    response = await ask(facade)
    assert response.status_code == 200
    wrong = {"x-api-key": "pd-wrong"}
    response = await facade.client.post("/v1/messages", json=ASKED, headers=wrong)
    assert_refused(response, 401, "authentication_error", "")
    async with httpx.AsyncClient(base_url=f"http://{facade.address}") as other:
        bearer = {"authorization": f"Bearer {KEY}"}
        assert (await other.post("/v1/messages", json=ASKED, headers=bearer)).status_code == 200


async def test_a_failure_after_the_first_token(
    facade: HttpFacade, client: anthropic.AsyncAnthropic
) -> None:
    facade.dispatcher.script = [Delta("a"), DecodeError(ErrorReason.DECODE_FAILED, "lost")]
    *_, delta, last = await streamed(facade)
    assert delta["delta"] == {"type": "text_delta", "text": "a"}
    assert last["error"] == {"type": "api_error", "message": "lost"}
    with pytest.raises(anthropic.APIStatusError, match="lost"):
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
            await stream.get_final_text()
