"""Answers of OpenAI's HTTP API as a client on a socket sees them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from coordinator.defaults import Defaults
from pdserve.chat import ChatMessage
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import ChatPrompt, Delta, FinishReason, Mode, Route, SamplingParams, TextPrompt
from tests.support.fake_dispatch import MODEL, ROUTE, answer, served
from tests.support.http_facade import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETION_PATH,
    HttpFacade,
    assert_error,
    chat,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_chat(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("Hel", "", "lo", finish=FinishReason.LENGTH, cached=3)
    response = await chat(facade, seed=4)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id") == "chatcmpl-" + response.headers["x-request-id"]
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    seen = facade.dispatcher.seen[0]
    assert seen.spec.prompt == ChatPrompt((ChatMessage("user", "Hi"),))
    assert seen.spec.sampling.seed == 4
    assert (seen.spec.mode, seen.spec.session, seen.spec.deadline) == (None, "", None)
    assert facade.dispatcher.streams[0].closed.is_set()
    record = seen.record
    assert (record.surface, record.operation, record.stream) == ("http", "chat", False)
    assert facade.observer.ends == [(record.request_id, "ok")]


async def test_completion(facade: HttpFacade) -> None:
    response = await facade.client.post(COMPLETION_PATH, json=COMPLETION)
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert facade.dispatcher.seen[0].spec.prompt == TextPrompt("Hi")
    assert facade.dispatcher.seen[0].spec.sampling.max_tokens == 16


async def test_route_headers(facade: HttpFacade) -> None:
    facade.dispatcher.route = Route(Mode.COLOCATED, "fall-back: préfill\r\nx: y", arm="")
    response = await chat(facade)
    assert response.headers["x-pdserve-mode"] == "colocated"
    assert response.headers["x-pdserve-reason"] == "fall-back: pr?fill  x: y"
    assert "x-pdserve-arm" not in response.headers
    facade.dispatcher.route = ROUTE
    assert (await chat(facade)).headers["x-pdserve-arm"] == "blue"


async def test_stream_bytes(facade: HttpFacade) -> None:
    facade.dispatcher.script = answer("Hel", "", "lo", "")
    response = await chat(facade, stream=True, stream_options={"include_usage": True})
    headers = response.headers
    assert response.status_code == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-pdserve-mode"] == "disaggregated"
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    head = chunks[0].copy()
    assert head["id"] == "chatcmpl-" + headers["x-request-id"]
    assert {chunk["id"] for chunk in chunks} == {head["id"]}
    assert {chunk["created"] for chunk in chunks} == {head["created"]}
    choices = [chunk["choices"] for chunk in chunks]
    assert [choice[0]["delta"] for choice in choices[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": ""},
    ]
    assert [choice[0]["finish_reason"] for choice in choices[:-1]] == [None, None, None, "stop"]
    assert choices[-1] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["usage"]["total_tokens"] == 11
    assert facade.dispatcher.seen[0].record.stream


async def test_first_chunk_does_not_wait_for_the_second(facade: HttpFacade) -> None:
    gate = asyncio.Event()
    facade.dispatcher.script = [Delta("first"), gate, *answer("second")]
    request = facade.client.stream("POST", COMPLETION_PATH, json={**COMPLETION, "stream": True})
    async with request as response:
        chunks = response.aiter_bytes()
        assert b'"text":"first"' in await anext(chunks)
        gate.set()
        assert b'"text":"second"' in await anext(chunks)


async def test_null_stream_is_no_stream(facade: HttpFacade) -> None:
    response = await chat(facade, stream=None, stream_options=None, temperature=None)
    assert response.headers["content-type"] == "application/json"


LOST = DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LOST, 502),
        (RejectedError(ErrorReason.CONTEXT_LENGTH_EXCEEDED, "too long", param="messages"), 400),
        (RejectedError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.0), 429),
        (RejectedError(ErrorReason.RATE_LIMITED, "slow down", retry_after_s=0.2), 429),
        (PdserveError(ErrorReason.NO_WORKER, "none", retry_after_s=2.5), 503),
        (PdserveError(ErrorReason.DEADLINE_EXCEEDED, "late"), 504),
        (PdserveError(ErrorReason.INTERNAL, "internal error"), 500),
    ],
)
async def test_error_before_the_first_token_has_its_own_status(
    facade: HttpFacade, stream: bool, error: PdserveError, status: int
) -> None:
    facade.dispatcher.script = [error]
    response = await chat(facade, stream=stream)
    assert_error(response, status, error.reason.label, error.param)
    assert response.json()["error"]["message"] == error.message
    assert response.json()["error"]["type"] == error.reason.value.openai_type
    waits = {None: None, 1.0: "1", 0.2: "1", 2.5: "3"}
    assert response.headers.get("retry-after") == waits[error.retry_after_s]
    assert [label for _, label in facade.observer.ends] == [error.reason.label]


async def test_error_after_the_first_token(facade: HttpFacade) -> None:
    facade.dispatcher.script = [Delta("a"), LOST]
    response = await chat(facade, stream=True)
    assert response.status_code == 200
    assert response.content.endswith(
        b'data: {"error":{"message":"the decode worker was lost","type":"server_error",'
        b'"param":null,"code":"decode_failed"}}\n\n'
    )
    assert b"[DONE]" not in response.content
    assert facade.dispatcher.streams[0].closed.is_set()
    assert [label for _, label in facade.observer.ends] == ["decode_failed"]


async def test_error_in_a_whole_answer_is_no_200(facade: HttpFacade) -> None:
    facade.dispatcher.script = [Delta("a"), LOST]
    assert_error(await chat(facade), 502, "decode_failed", None)
    assert facade.dispatcher.streams[0].closed.is_set()


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_without_an_end_is_an_error(facade: HttpFacade, stream: bool) -> None:
    facade.dispatcher.script = [Delta("a")]
    response = await chat(facade, stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert b'"code":"internal"' in response.content
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize("steps", [[], [Delta("a")]])
async def test_faults_of_ours_are_not_told(facade: HttpFacade, steps: list[Delta]) -> None:
    facade.dispatcher.script = [*steps, ValueError("10.0.0.7: secret")]
    response = await chat(facade, stream=True)
    assert response.status_code == (200 if steps else 500)
    assert b"secret" not in response.content
    assert b'"code":"internal"' in response.content
    assert [label for _, label in facade.observer.ends] == ["internal"]


async def test_request_id(facade: HttpFacade) -> None:
    async def answered_id(asked: str | None) -> str:
        headers = {} if asked is None else {"x-request-id": asked}
        response = await facade.client.post(CHAT_PATH, json=CHAT, headers=headers)
        assert facade.dispatcher.seen[-1].spec.request_id == response.headers["x-request-id"]
        return str(response.headers["x-request-id"])

    assert await answered_id("my-id_1.2") == "my-id_1.2"
    assert await answered_id("x" * 128) == "x" * 128
    fresh = {await answered_id(bad) for bad in (None, "", "a b", "x" * 129, "a/b")}
    assert len(fresh) == 5
    assert all(len(request_id) == 32 for request_id in fresh)
    missing = await facade.client.get("/nope", headers={"x-request-id": "mine"})
    assert missing.headers["x-request-id"] == "mine"


async def test_trace_id(facade: HttpFacade) -> None:
    async def trace_id(traceparent: str | None) -> str:
        headers = {} if traceparent is None else {"traceparent": traceparent}
        await facade.client.post(CHAT_PATH, json=CHAT, headers=headers)
        return facade.dispatcher.seen[-1].record.trace_id

    known = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert await trace_id(f"00-{known}-00f067aa0ba902b7-01") == known
    for bad in (None, "nonsense", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        fresh = await trace_id(bad)
        assert len(fresh) == 32
        assert int(fresh, 16)


async def test_mode_and_session_headers(facade: HttpFacade) -> None:
    headers = {"x-pdserve-mode": "Colocated", "x-pdserve-session": "s1"}
    await facade.client.post(
        CHAT_PATH, json={**CHAT, "cache_salt": "c", "priority": -2}, headers=headers
    )
    spec = facade.dispatcher.seen[0].spec
    assert (spec.mode, spec.session, spec.cache_salt) == (Mode.COLOCATED, "s1", "c")
    assert spec.priority == -2


async def test_what_a_request_leaves_out_is_the_models_default(facade: HttpFacade) -> None:
    own = SamplingParams(temperature=0.5, top_k=7)
    before, facade.dispatcher.models = facade.dispatcher.models, served(defaults=Defaults(own))
    try:
        await chat(facade, top_k=3)
    finally:
        facade.dispatcher.models = before
    assert facade.dispatcher.seen[0].spec.sampling == replace(own, top_k=3)
