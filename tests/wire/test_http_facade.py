"""OpenAI's HTTP API as a client on a socket sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from coordinator.gateway.keys import KeyRing, new_key
from pdserve.config import GatewayConfig, ModelConfig
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import ChatPrompt, Delta, FinishReason, Mode, Route, TextPrompt
from tests.support.fake_dispatch import MODEL, ROUTE, answer, served
from tests.support.http_facade import HttpFacade, http_facade

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}
MAX_BODY = 64 * 1024


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[HttpFacade]:
    async with http_facade(GatewayConfig(max_body_bytes=MAX_BODY)) as facade:
        yield facade


@pytest.fixture
def facade(running: HttpFacade) -> HttpFacade:
    running.reset()
    return running


async def chat(facade: HttpFacade, **fields: Any) -> httpx.Response:
    return await facade.client.post(CHAT_PATH, json={**CHAT, **fields})


def assert_error(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert response.headers["x-request-id"]


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
    assert seen.spec.prompt == ChatPrompt((("user", "Hi"),))
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
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}
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
    await facade.client.post(CHAT_PATH, json={**CHAT, "cache_salt": "c"}, headers=headers)
    spec = facade.dispatcher.seen[0].spec
    assert (spec.mode, spec.session, spec.cache_salt) == (Mode.COLOCATED, "s1", "c")


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-pdserve-mode": "fastest"}, {}, "x-pdserve-mode"),
        ({"x-pdserve-mode": ""}, {}, "x-pdserve-mode"),
        ({"x-pdserve-session": "s" * 257}, {}, "x-pdserve-session"),
        ({}, {"messages": []}, "messages"),
        ({}, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({}, {"max_tokens": -1}, "max_tokens"),
        ({}, {"max_tokens": 1001}, "max_tokens"),
        ({}, {"max_completion_tokens": 0}, "max_completion_tokens"),
        ({}, {"temperature": 2.5}, "temperature"),
        ({}, {"top_p": 0}, "top_p"),
        ({}, {"top_k": -2}, "top_k"),
        ({}, {"stop": [""]}, "stop"),
        ({}, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({}, {"seed": 2**63}, "seed"),
        ({}, {"stream_options": {"include_usage": True}}, "stream_options"),
        ({}, {"unknown": 1}, "unknown"),
        ({}, {"n": 2}, "n"),
    ],
)
async def test_bad_requests(
    facade: HttpFacade, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    response = await facade.client.post(CHAT_PATH, json={**CHAT, **fields}, headers=headers)
    assert_error(response, 400, "invalid_argument", param)
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert facade.dispatcher.seen == []
    assert [label for _, label in facade.observer.ends] == ["invalid_argument"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b'{"model"', "application/json"),
        (b"", "application/json"),
        (b'{"model":"\xff"}', "application/json"),
        (b"[" * 10_000, "application/json"),
        (json.dumps(COMPLETION).encode(), "text/plain"),
        (json.dumps(COMPLETION).encode(), "application/x-www-form-urlencoded"),
        (json.dumps(COMPLETION).encode(), ""),
    ],
)
async def test_bodies_that_are_no_json(
    facade: HttpFacade, content: bytes, content_type: str
) -> None:
    response = await facade.client.post(
        COMPLETION_PATH, content=content, headers={"content-type": content_type}
    )
    assert_error(response, 400, "invalid_argument", None)


async def test_content_types_that_are_json(facade: HttpFacade) -> None:
    for content_type in ("Application/JSON; charset=utf-8", "application/vnd.api+json"):
        response = await facade.client.post(
            COMPLETION_PATH,
            content=json.dumps(COMPLETION),
            headers={"content-type": content_type},
        )
        assert response.status_code == 200


async def test_body_too_large_by_its_header_is_not_read(facade: HttpFacade) -> None:
    reader, writer = await asyncio.open_connection(*facade.address.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY + 1)
    )
    assert await reader.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n"
    writer.close()


async def test_body_too_large_in_chunks(facade: HttpFacade) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100 * MAX_BODY:
            sent += 8192
            yield b" " * 8192

    response = await facade.client.post(
        COMPLETION_PATH, content=endless(), headers={"content-type": "application/json"}
    )
    assert_error(response, 413, "body_too_large", None)
    assert [label for _, label in facade.observer.ends] == ["body_too_large"]


async def test_body_as_large_as_allowed(facade: HttpFacade) -> None:
    content = json.dumps(COMPLETION).encode().ljust(MAX_BODY)
    headers = {"content-type": "application/json"}
    response = await facade.client.post(COMPLETION_PATH, content=content, headers=headers)
    assert response.status_code == 200


async def test_unknown_model(facade: HttpFacade) -> None:
    assert_error(await chat(facade, model="gpt-9"), 404, "model_not_found", "model")
    missing = await facade.client.get("/v1/models/gpt-9")
    assert_error(missing, 404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", CHAT_PATH, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health/live", 405),
    ],
)
async def test_unknown_paths_and_methods(
    facade: HttpFacade, method: str, path: str, status: int
) -> None:
    response = await facade.client.request(method, path)
    code = "model_not_found" if path == "/v1/models/" else "not_found"
    param = "model" if path == "/v1/models/" else None
    assert_error(response, status, code, param)
    assert ("allow" in response.headers) == (status == 405)


async def test_models(facade: HttpFacade) -> None:
    listed = (await facade.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1000)
    assert (await facade.client.get(f"/v1/models/{MODEL}")).json() == card


async def test_what_operators_ask(facade: HttpFacade) -> None:
    assert (await facade.client.get("/health/live")).status_code == 200
    ready = await facade.client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, facade.ops.state)
    facade.ops.is_ready = False
    ready = await facade.client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (503, facade.ops.state)
    metrics = await facade.client.get("/metrics")
    assert metrics.text == "pdserve_requests_total 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert (await facade.client.get("/version")).json()["version"]
    assert (await facade.client.get("/fleet")).json() == {"workers": []}


async def test_openapi_document_describes_the_bodies(facade: HttpFacade) -> None:
    document = (await facade.client.get("/openapi.json")).json()
    post = document["paths"][CHAT_PATH]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatCompletionRequest"
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    assert "prompt" in schemas["CompletionRequest"]["required"]


async def send_and_leave(facade: HttpFacade, body: dict[str, Any], until: asyncio.Event) -> None:
    """Posts a completion, and drops the connection as soon as `until` is set."""
    content = json.dumps({**COMPLETION, **body}).encode()
    _, writer = await asyncio.open_connection(*facade.address.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    await until.wait()
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_before_the_first_token(facade: HttpFacade, stream: bool) -> None:
    facade.dispatcher.script = [asyncio.Event()]
    await send_and_leave(facade, {"stream": stream}, until=facade.dispatcher.opening)
    await asyncio.wait_for(facade.dispatcher.open_cancelled.wait(), 1)
    await asyncio.wait_for(facade.observer.ended.wait(), 1)
    assert [label for _, label in facade.observer.ends] == ["cancelled"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_between_tokens(facade: HttpFacade, stream: bool) -> None:
    facade.dispatcher.script = [Delta("a"), asyncio.Event()]
    await send_and_leave(facade, {"stream": stream}, until=facade.dispatcher.opening)
    await asyncio.wait_for(facade.observer.ended.wait(), 1)
    assert facade.dispatcher.streams[0].closed.is_set()


async def test_client_leaves_in_its_own_body(facade: HttpFacade) -> None:
    _, writer = await asyncio.open_connection(*facade.address.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    await asyncio.wait_for(facade.observer.ended.wait(), 1)
    assert [label for _, label in facade.observer.ends] == ["cancelled"]


async def test_a_slow_reader_holds_its_own_stream_back(facade: HttpFacade) -> None:
    text = "x" * 65_536
    facade.dispatcher.script = [Delta(text) for _ in range(2_000)] + answer("end")
    content = json.dumps({**COMPLETION, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*facade.address.split(":"), limit=65_536)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    await reader.readline()
    # Another request is served meanwhile, and most of the slow one's answer is still to come.
    assert (await facade.client.get("/health/live")).status_code == 200
    stream = facade.dispatcher.streams[0]
    assert len(stream.steps) > 1_000
    writer.close()
    await asyncio.wait_for(stream.closed.wait(), 1)


async def test_connection_is_kept_after_an_answer(facade: HttpFacade) -> None:
    reader, writer = await asyncio.open_connection(*facade.address.split(":"))
    content = json.dumps(COMPLETION).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    for _ in range(3):
        writer.write(request)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b'"cached_tokens":0}}}')
    writer.close()
    assert [label for _, label in facade.observer.ends] == ["ok"] * 3


async def test_keys() -> None:
    user, user_entry = new_key("acme", may_choose_mode=False)
    admin, admin_entry = new_key("ops", admin=True)
    keys = KeyRing([user_entry, admin_entry])
    async with http_facade(keys=keys) as facade:

        async def ask(method: str, path: str, key: str | None, **more: str) -> httpx.Response:
            headers = {**more} if key is None else {"authorization": f"Bearer {key}", **more}
            body = CHAT if method == "POST" else None
            return await facade.client.request(method, path, json=body, headers=headers)

        for method, path in (
            ("POST", CHAT_PATH),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("GET", "/metrics"),
            ("GET", "/fleet"),
        ):
            for key in (None, "pd-wrong"):
                response = await ask(method, path, key)
                assert_error(response, 401, "unauthenticated", None)
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health/live", "/health/ready", "/version"):
            assert (await ask("GET", path, None)).status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert (await ask("GET", path, user)).status_code == 200
        assert_error(await ask("GET", "/fleet", user), 403, "permission_denied", None)
        assert (await ask("GET", "/fleet", admin)).status_code == 200

        assert (await ask("POST", CHAT_PATH, user)).status_code == 200
        seen = facade.dispatcher.seen[0]
        assert seen.caller.key_id == user_entry.id
        assert seen.spec.tenant == seen.record.tenant == "acme"
        forbidden = await ask("POST", CHAT_PATH, user, **{"x-pdserve-mode": "auto"})
        assert_error(forbidden, 403, "permission_denied", "x-pdserve-mode")
        allowed = await ask("POST", CHAT_PATH, admin, **{"x-pdserve-mode": "auto"})
        assert allowed.status_code == 200


async def test_a_model_may_forbid_the_choice(facade: HttpFacade) -> None:
    usual = facade.dispatcher.models
    facade.dispatcher.models = served(ModelConfig(name=MODEL, mode_override=False))
    try:
        response = await facade.client.post(
            CHAT_PATH, json=CHAT, headers={"x-pdserve-mode": "colocated"}
        )
    finally:
        facade.dispatcher.models = usual
    assert_error(response, 403, "permission_denied", "x-pdserve-mode")
