"""`kill -9` of the only decode worker in mid-stream: every answer goes on after its restart."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fleet import Fleet, until
from tests.support.prompts import begun_again
from tests.support.second_coordinator import second_coordinator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RESTART_S = 300.0
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 30}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chat": {},
    "stop": {"stop": ["no such words", "nor these"]},
    "penalty": {"presence_penalty": 0.5},
    "schema": {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    "logprobs": {"logprobs": 2},
}


def ask(fleet: Fleet, way: str, begun: threading.Event) -> tuple[str, str | None, int, list[str]]:
    """Text, finish reason, tokens answered, and the tokens that log probabilities are of."""
    prompt = begun_again(50, 6, 2)
    common: dict[str, Any] = {
        "model": fleet.model,
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_headers": {"x-pdserve-mode": "disaggregated"},
    }
    if way == "chat":
        # A message that is to be gone on with, or there would be near ties.
        parts = fleet.openai.chat.completions.create(
            messages=[
                {"role": "user", "content": "Tell."},
                {"role": "assistant", "content": prompt},
            ],
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
            **common,
        )
    else:
        parts = fleet.openai.completions.create(prompt=prompt, **common, **WAYS[way])
    text, reason, tokens, answered = "", None, list[str](), 0
    for number, part in enumerate(parts):
        if number == 8:
            begun.set()
        for choice in part.choices:
            text += (choice.delta.content or "") if way == "chat" else choice.text
            reason = choice.finish_reason or reason
            tokens += (way == "logprobs" and choice.logprobs.tokens) or []
        answered = part.usage.completion_tokens if part.usage else answered
    return text, reason, answered, tokens


@pytest.mark.parametrize("transport", ["grpc"])
def test_answers_are_those_of_an_undisturbed_run(fleet: Fleet, transport: str) -> None:
    until(fleet.ready)
    since = len(fleet.system.events)
    with (
        second_coordinator(fleet, transport, recovery_wait_s=RESTART_S) as clients,
        ThreadPoolExecutor(len(WAYS)) as pool,
    ):
        whole = list(pool.map(lambda way: ask(clients, way, threading.Event()), WAYS))
        begun = {way: threading.Event() for way in WAYS}
        asking = [pool.submit(ask, clients, way, begun[way]) for way in WAYS]
        for answer, event in zip(asking, begun.values(), strict=True):
            answer.add_done_callback(lambda _, event=event: event.set())
            event.wait()
        fleet.system.child("decode-0").kill()
        for way, expected, answer in zip(WAYS, whole, asking, strict=True):
            assert answer.result() == expected, way
    assert fleet.system.wait_for("died", name="decode-0", since=since)["how"]
    until(fleet.ready)
