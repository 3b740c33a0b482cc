"""What the HTTP façade refuses, and how it says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.http_facade import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETION_PATH,
    MAX_BODY,
    HttpFacade,
    assert_error,
    chat,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters}}


TOOLS = [tool({})]


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-pdserve-mode": "fastest"}, {}, "x-pdserve-mode"),
        ({"x-pdserve-mode": ""}, {}, "x-pdserve-mode"),
        ({"x-pdserve-session": "s" * 257}, {}, "x-pdserve-session"),
        ({"x-pdserve-arm": "a" * 257}, {}, "x-pdserve-arm"),
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
        ({}, {"tools": TOOLS}, "tool_choice"),  # this model has no parser
        ({}, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({}, {"tool_choice": "auto"}, "tool_choice"),
        ({}, {"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({}, {"tools": TOOLS * 129, "tool_choice": "none"}, "tools"),
        ({}, {"tools": [tool(deep(65))], "tool_choice": "none"}, "tools.0"),
        ({}, {"n": 129}, "n"),
        ({}, {"n": -(10**30)}, "n"),
        ({}, {"suffix": "x"}, "suffix"),
        ({}, {"stop": ["a"] * 10_000}, "stop"),
        ({}, {"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
        ({}, {"logit_bias": {str(10**30): 1}}, "logit_bias"),
        ({}, {"logit_bias": {"1": -1e300}}, "logit_bias"),
        ({}, {"logprobs": True, "top_logprobs": 10**30}, "top_logprobs"),
        ({}, {"prompt_logprobs": -1}, "prompt_logprobs"),
        ({}, {"max_tokens": -(10**30)}, "max_tokens"),
        ({}, {"structured_outputs": {"regex": "((.{1,99}){1,99}){1,99}"}}, "structured_outputs"),
        ({}, {"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({}, {"structured_outputs": {"grammar": ""}}, "structured_outputs"),
        ({}, {"response_format": schema({"pattern": "(.{1,99}){1,99}"})}, "response_format"),
        ({}, {"response_format": schema(deep(65))}, "response_format"),
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
        (b'{"model":"tiny","prompt":"a","temperature":NaN}', "application/json"),
        (b'{"model":"tiny","prompt":"a","stop":"\\ud800"}', "application/json"),
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


async def test_what_other_models_do_is_told_to_be_elsewhere(facade: HttpFacade) -> None:
    response = await facade.client.post("/v1/embeddings", json={"model": "tiny", "input": "Hi"})
    assert_error(response, 404, "not_found", None)
    assert "/v1/embeddings: this server writes text" in response.json()["error"]["message"]
