"""The official client against the HTTP façade: what an application developer's code meets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from coordinator.gateway.keys import KeyRing, new_key
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import Delta
from tests.support.fake_dispatch import MODEL, answer
from tests.support.http_facade import HttpFacade, http_facade

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, ENTRY = new_key("acme")
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[HttpFacade]:
    async with http_facade(keys=KeyRing([ENTRY])) as facade:
        yield facade


@pytest.fixture
def facade(running: HttpFacade) -> HttpFacade:
    running.reset()
    return running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(running: HttpFacade) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{running.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


async def test_chat(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    done = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=5,
        temperature=0,
        user="bob",
        extra_body={"top_k": 5},
    )
    assert done.choices[0].message.content == "Hello world"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.total_tokens == 9
    assert facade.dispatcher.seen[0].spec.sampling.top_k == 5


async def test_chat_stream(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    facade.dispatcher.script = answer("Hel", "lo ", "wörld")
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello wörld"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_completion(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model=MODEL, prompt=[1, 2, 3])
    assert done.choices[0].text == "Hello world"
    stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello world"


async def test_models(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RejectedError(ErrorReason.CONTEXT_LENGTH_EXCEEDED, "too long"), openai.BadRequestError),
        (RejectedError(ErrorReason.PERMISSION_DENIED, "no"), openai.PermissionDeniedError),
        (RejectedError(ErrorReason.MODEL_NOT_FOUND, "none"), openai.NotFoundError),
        (RejectedError(ErrorReason.QUEUE_FULL, "full"), openai.RateLimitError),
        (DecodeError(ErrorReason.DECODE_FAILED, "lost"), openai.InternalServerError),
        (PdserveError(ErrorReason.NO_WORKER, "none"), openai.InternalServerError),
    ],
)
async def test_errors_are_the_clients_own_classes(
    facade: HttpFacade,
    client: openai.AsyncOpenAI,
    error: PdserveError,
    kind: type[openai.APIStatusError],
) -> None:
    facade.dispatcher.script = [error]
    with pytest.raises(kind) as caught:
        await client.completions.create(model=MODEL, prompt="Hi")
    assert type(caught.value) is kind
    assert caught.value.code == error.reason.label
    assert caught.value.request_id == facade.dispatcher.seen[0].spec.request_id
    assert error.message in caught.value.message


async def test_wrong_key(facade: HttpFacade, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="pd-wrong").models.list()


async def test_error_in_mid_stream_is_raised(
    facade: HttpFacade, client: openai.AsyncOpenAI
) -> None:
    facade.dispatcher.script = [Delta("a"), DecodeError(ErrorReason.DECODE_FAILED, "lost")]
    stream = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="lost"):
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert texts == ["a"]


async def test_refused_then_retried_by_the_client(
    facade: HttpFacade, client: openai.AsyncOpenAI
) -> None:
    full = RejectedError(ErrorReason.QUEUE_FULL, "full", retry_after_s=0.0)
    facade.dispatcher.script = [full]
    with pytest.raises(openai.RateLimitError):
        await client.with_options(max_retries=1).completions.create(model=MODEL, prompt="Hi")
    assert len(facade.dispatcher.seen) == 2
