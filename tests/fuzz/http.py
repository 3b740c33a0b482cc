"""HTTP requests made from the OpenAPI document that the server itself gives out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import given, note
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from pdserve.errors import ErrorReason
from tests.fuzz.system import OVERLOAD, TIMEOUT_S, System
from tests.fuzz.values import SOUND
from tests.support.sim_fleet import MODEL

_BY_LABEL = {reason.label: reason for reason in ErrorReason}
_GENERATING = ("POST /v1/chat/completions", "POST /v1/completions")
_TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}
)
_SOUND = {
    **SOUND,
    "logit_bias": SOUND["logit_bias"].map(lambda biases: {str(k): v for k, v in biases.items()}),
    "model": st.just(MODEL),
    "messages": st.lists(_TURNS, min_size=1, max_size=3),
    "prompt": st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 257), min_size=1),
    "tokens": st.lists(st.integers(0, 257)),
    "input": st.text(min_size=1, max_size=20),
    "instructions": st.text(max_size=20),
    "system": st.text(max_size=20),
    "max_output_tokens": SOUND["max_tokens"],
    "stop_sequences": SOUND["stop"],
    "n": st.integers(1, 4),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
}


def fuzz(system: System) -> Iterator[tuple[str, Any]]:
    """By operation, a test that sends one of its requests each time that hypothesis calls it."""
    session = requests.Session()
    session.trust_env = False
    document = session.get(f"http://{system.http}/openapi.json", timeout=TIMEOUT_S).json()
    schema = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        operation = found.ok()
        name = f"{operation.method.upper()} {operation.path}"
        yield name, _asking(system, session, name, operation)


def _asking(system: System, session: requests.Session, name: str, operation: Any) -> Any:
    modes = list(GenerationMode) if name.startswith("POST") else [GenerationMode.POSITIVE]

    @given(
        case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]),
        data=st.data(),
    )
    def ask(case: Any, data: Any) -> None:
        request = case.as_transport_kwargs(base_url=f"http://{system.http}")
        if isinstance(body := request.get("json"), dict):
            _mend(body, data)
            if name in _GENERATING and data.draw(st.booleans()):
                body["stream"] = True
        note(str(request))
        with system.tally.timed():
            response = session.request(**request, timeout=TIMEOUT_S)
        system.tally.answers[name, _checked(name, response)] += 1

    return ask


def _mend(body: dict[str, Any], data: Any) -> None:
    """Leaves some requests as they are, gives others a model that is served, and makes what is
    left of others sound."""
    match data.draw(st.sampled_from(["model", "all", "nothing"])):
        case "model":
            body["model"] = MODEL
        case "all":
            for field in tuple(body):
                del body[field]
                if field in _SOUND:
                    body[field] = data.draw(_SOUND[field])


_ANTHROPIC = {
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 503,
    "timeout_error": 504,
}
_ENDS = {
    *("response.completed", "response.incomplete", "response.failed"),
    *("message_stop", "error"),
}


def _checked(name: str, response: Any) -> str:
    """The status, of an answer that is as documented."""
    if "/v1/messages" in name and response.status_code != 200:
        return f"{response.status_code} {_anthropic(response.json(), response.status_code)}"
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        assert response.headers["content-type"] == "application/json"
        reason = _reason(response.json())
        assert response.status_code < 500 or reason in OVERLOAD, response.text
        expected = {404, 405} if reason is ErrorReason.NOT_FOUND else {reason.value.http}
        assert response.status_code in expected
        return f"{response.status_code} {reason.label}"
    if response.headers["content-type"].startswith("text/event-stream"):
        return f"200 streamed, {_end(response.text)}"
    if response.headers["content-type"] == "application/json":
        response.json()
    return "200"


def _reason(body: Any) -> ErrorReason:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    reason = _BY_LABEL[error["code"]]
    assert error["type"] == reason.value.openai_type
    return reason


def _anthropic(body: Any, status: int) -> str:
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    kind: str = body["error"]["type"]
    assert body["type"] == "error"
    assert status == _ANTHROPIC.get(kind, 400)
    assert status < 500 or kind == "overloaded_error", body
    return kind


def _end(text: str) -> str:
    """How a stream of events ended."""
    *events, last, nothing = text.split("\n\n")
    assert nothing == ""
    if last.startswith("event: "):
        names = [event.split("\n")[0].removeprefix("event: ") for event in (*events, last)]
        assert [name in _ENDS for name in names] == [False] * len(events) + [True]
        return names[-1]
    for event in events:
        assert "choices" in json.loads(event.removeprefix("data: "))
    if last == "data: [DONE]":
        return "done"
    return _reason(json.loads(last.removeprefix("data: "))).label
