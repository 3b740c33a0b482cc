"""`/tokenize` and `/detokenize` on a real socket, and what this server has no model for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from coordinator.gateway.keys import KeyRing, new_key
from coordinator.prompts import ByteEncoder
from coordinator.token_threads import THREAD_CHARS, THREAD_TOKENS
from tests.support.fake_dispatch import CONTEXT_LENGTH, MODEL
from tests.support.http_facade import HttpFacade, assert_error, http_facade

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, ENTRY = new_key("acme", rate="1000/minute")
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def facade() -> AsyncIterator[HttpFacade]:
    async with http_facade(keys=KeyRing([ENTRY])) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


async def tokens(facade: HttpFacade, **fields: Any) -> httpx.Response:
    return await facade.client.post("/tokenize", json=fields)


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


async def test_a_prompt(facade: HttpFacade) -> None:
    response = await tokens(facade, model=MODEL, prompt="Hé", return_token_strs=True)
    assert response.json() == {
        "count": 3,
        "max_model_len": CONTEXT_LENGTH,
        "tokens": ids("Hé"),
        "token_strs": ["H", "\ufffd", "\ufffd"],
    }
    assert response.headers["x-request-id"]
    assert not facade.dispatcher.seen


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user: Hi\nassistant: A\nassistant:"),
        ({"add_generation_prompt": False}, "user: Hi\nassistant: A\n"),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "user: Hi\nassistant: A",
        ),
    ],
)
async def test_a_conversation(facade: HttpFacade, fields: dict[str, Any], text: str) -> None:
    told = (await tokens(facade, messages=TURNS, **fields)).json()
    assert told["tokens"] == ids(text)
    assert told["token_strs"] is None
    back = await facade.client.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_text_longer_than_the_context(facade: HttpFacade) -> None:
    assert (await tokens(facade, prompt="x" * 5000)).json()["count"] == 5000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": TURNS}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": TURNS, "continue_final_message": True}, "continue_final_message"),
        ({"messages": TURNS, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_bad_requests(facade: HttpFacade, fields: dict[str, Any], param: str) -> None:
    assert_error(await tokens(facade, **fields), 400, "invalid_argument", param)


async def test_models_keys_and_ids_that_are_none(facade: HttpFacade) -> None:
    assert_error(await tokens(facade, model="other", prompt="a"), 404, "model_not_found", "model")
    for bad in (-1, 259, 2**63):
        response = await facade.client.post("/detokenize", json={"tokens": [5, bad]})
        assert_error(response, 400, "invalid_argument", "tokens")
    assert (await facade.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    for path in ("/tokenize", "/detokenize"):
        response = await facade.client.post(path, json={}, headers={"authorization": "Bearer x"})
        assert_error(response, 401, "unauthenticated", None)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/pooling",
    ],
)
async def test_what_a_model_of_text_cannot_do(facade: HttpFacade, path: str) -> None:
    response = await facade.client.post(path, json={})
    assert_error(response, 404, "not_found", None)
    words = "this server writes text, and does nothing else with a model"
    assert response.json()["error"]["message"] == f"no endpoint POST {path}: {words}"


async def test_what_takes_long_leaves_the_event_loop_to_others(
    facade: HttpFacade, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def note(encoder: ByteEncoder, ids: tuple[int, ...]) -> str:
        threads.append(threading.current_thread())
        return ""

    monkeypatch.setattr(ByteEncoder, "decode", note)
    monkeypatch.setattr(ByteEncoder, "token_strings", note)
    many = THREAD_TOKENS
    assert (await tokens(facade, prompt="a" * many, return_token_strs=True)).is_success
    model = facade.dispatcher.models[MODEL]
    monkeypatch.setitem(facade.dispatcher.models, MODEL, replace(model, context_length=many))
    asked = {"tokens": ids("a") * many}
    assert (await facade.client.post("/detokenize", json=asked)).is_success
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_more_tokens_than_the_context_have_no_text(facade: HttpFacade) -> None:
    asked = {"tokens": ids("a") * (CONTEXT_LENGTH + 1)}
    response = await facade.client.post("/detokenize", json=asked)
    assert_error(response, 400, "invalid_argument", "tokens")


async def test_long_texts_take_turns(facade: HttpFacade, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()
    at_work: list[int] = []
    most = 0

    async def slow(*_: Any) -> tuple[int, ...]:
        nonlocal most
        at_work.append(1)
        most = max(most, len(at_work))
        begun.set()
        await goes_on.wait()
        at_work.pop()
        return (1,)

    monkeypatch.setattr(ByteEncoder, "encode_async", slow)
    text = "a" * THREAD_CHARS
    async with asyncio.TaskGroup() as asking:
        long = [asking.create_task(tokens(facade, prompt=text)) for _ in range(5)]
        await begun.wait()
        goes_on.set()
    assert [task.result().json()["tokens"] for task in long] == [[1]] * 5
    assert most == 1
