"""Input made to hurt: a quick and plain refusal over HTTP and gRPC, before any worker sees it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import pytest
import pytest_asyncio

from pdserve.client import (
    AsyncClient,
    CallError,
    ChatMessage,
    ChatRequest,
    GenerateRequest,
    Tool,
    ToolCall,
)
from pdserve.client import SamplingParams as Sampling
from pdserve.errors import ErrorReason
from pdserve.v1.generation_pb2 import StructuredOutputs
from tests.support.asking import decode, prefill
from tests.support.http_facade import assert_error
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL, SimFleet, sim_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")

QUICK_CPU_S = 1.0
"""Of this process, which is client, coordinator and workers at once."""
TRIES = 3

HUGE = {
    "4000 digits": "-1" + "0" * 4000,
    "below 64 bits": str(-(2**63) - 1),
    "above 64 bits": str(2**64),
    "1e30": str(10**30),
}
DEEP = '{"items":' * 10_000 + "{}" + "}" * 10_000
CATASTROPHIC = ["(.{1,99}){1,99}", "((a{1,9}){1,9}){1,9}", ".?" * 64, ".*" * 500, "." * 100_000]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(prefill(), decode()) as running:
        yield running


async def quickly(ask: Callable[[], Awaitable[T]]) -> T:
    """What is answered; of a few tries, for others on the machine make a processor slower, the
    cheapest must be cheap."""
    for _ in range(TRIES):
        began = time.process_time()
        answer = await ask()
        took_s = time.process_time() - began
        if took_s < QUICK_CPU_S:
            return answer
    raise AssertionError(f"it took {took_s:.1f} s of a core")


async def refused(
    fleet: SimFleet,
    content: bytes | str,
    status: int,
    param: str | None,
    path: str = "/v1/completions",
) -> None:
    headers = {"content-type": "application/json"}
    response = await quickly(
        lambda: fleet.coordinator.http.post(path, content=content, headers=headers)
    )
    assert_error(response, status, "body_too_large" if status == 413 else "invalid_argument", param)
    await fleet.until_idle()


def body(field: str, value: str) -> str:
    """A request in which one field is this JSON text."""
    fields = {"model": json.dumps(MODEL), "prompt": '"Hi"', field: value}
    return "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1e400"),
        ("temperature", "-1e400"),
        ("top_p", "5e-324e1"),
        ("stop", json.dumps(["a"] * 100_000)),
        ("bad_words", json.dumps(["a"] * 100_000)),
        ("stop_token_ids", json.dumps([1] * 100_000)),
        ("logit_bias", json.dumps({str(number): 1 for number in range(100_000)})),
        ("prompt", json.dumps(["a"] * 100_000)),
        ("cache_salt", json.dumps("a" * 1_000_000)),
        ("structured_outputs", '{"json":' + DEEP + "}"),
        ("structured_outputs", json.dumps({"json": DEEP})),
        (
            "response_format",
            '{"type":"json_schema","json_schema":{"name":"n","schema":' + DEEP + "}}",
        ),
        *(("structured_outputs", json.dumps({"regex": regex})) for regex in CATASTROPHIC),
        *(("structured_outputs", json.dumps({"json": {"pattern": it}})) for it in CATASTROPHIC),
        ("structured_outputs", json.dumps({"grammar": "root ::= " + "[^x]? " * 1000})),
        ("structured_outputs", json.dumps({"choice": [""] * 100_000})),
    ],
)
async def test_one_bad_field(fleet: SimFleet, field: str, value: str) -> None:
    response_name = None if value in ("5e-324e1",) or DEEP in value else field
    await refused(fleet, body(field, value), 400, response_name)


TURN = {"role": "user", "content": "a"}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
CALLS = [{"role": "assistant", "content": "", "tool_calls": [CALL] * 40_000}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        ("/v1/chat/completions", "messages", [TURN] * 100_000, "messages"),
        ("/v1/chat/completions", "messages", CALLS, "messages"),
        ("/v1/chat/completions", "tools", [TOOL] * 80_000, "tools"),
        ("/v1/completions", "prompt", [[1]] * 800_000, "prompt"),
        ("/v1/completions", "logit_bias", {str(n): 1 for n in range(300_000)}, "logit_bias"),
        ("/v1/responses", "input", [TURN] * 100_000, "input"),
        ("/tokenize", "messages", [TURN] * 100_000, "messages"),
        ("/detokenize", "tokens", [1] * 1_000_000, "tokens"),
    ],
)
async def test_as_many_as_a_body_has_room_for(
    fleet: SimFleet, path: str, field: str, value: Any, param: str | None
) -> None:
    needed: dict[str, Any] = {}
    if path == "/v1/completions":
        needed = {"prompt": "Hi"}
    elif path == "/v1/chat/completions":
        needed = {"messages": [TURN]}
    content = json.dumps({"model": MODEL, **needed, field: value})
    await refused(fleet, content, 400, param, path)


async def test_as_many_turns_as_anthropics_clients_can_send(fleet: SimFleet) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "messages": [TURN] * 100_000}
    response = await quickly(lambda: fleet.coordinator.http.post("/v1/messages", json=asked))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize(
    "field",
    [
        *("max_tokens", "n", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs"),
        *("priority", "truncate_prompt_tokens", "best_of"),
    ],
)
async def test_integers_beyond_all_bounds(fleet: SimFleet, field: str, number: str) -> None:
    await refused(fleet, body(field, number), 400, field)


@pytest.mark.parametrize("text", [r'"\ud800"', r'"a\udfffb"'])
@pytest.mark.parametrize("field", ["model", "prompt", "stop", "cache_salt", "user"])
async def test_lone_surrogates(fleet: SimFleet, field: str, text: str) -> None:
    await refused(fleet, body(field, text), 400, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "0x1", "01", "1."])
async def test_numbers_that_json_has_not(fleet: SimFleet, number: str) -> None:
    await refused(fleet, body("temperature", number), 400, None)


async def test_ten_megabytes(fleet: SimFleet) -> None:
    await refused(fleet, body("prompt", json.dumps("a" * 10_000_000)), 413, None)


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "", "json", "*/*"]
)
async def test_wrong_content_types(fleet: SimFleet, kind: str) -> None:
    response = await fleet.coordinator.http.post(
        "/v1/completions", content=body("seed", "1"), headers={"content-type": kind}
    )
    assert_error(response, 400, "invalid_argument", None)


def generate(text: str = "Hi", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(model=MODEL, text=text, sampling=Sampling(**sampling))


def structured(**constraint: Any) -> GenerateRequest:
    return generate(structured_outputs=StructuredOutputs(**constraint))


INVALID = ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "reason", "param"),
    [
        (generate("a" * 10_000_000), ErrorReason.BODY_TOO_LARGE, None),
        (generate(stop=["a"] * 100_000), INVALID, "sampling.stop"),
        (generate(stop_token_ids=range(100_000)), INVALID, "sampling.stop_token_ids"),
        (generate(logit_bias={n: 1.0 for n in range(100_000)}), INVALID, "sampling.logit_bias"),
        *(
            (generate(temperature=value), INVALID, "sampling.temperature")
            for value in (float("nan"), float("inf"), -float("inf"), 1e308, -0.1)
        ),
        *(
            (generate(**{field: 2**32 - 1}), INVALID, f"sampling.{field}")
            for field in ("max_tokens", "top_k", "min_tokens", "logprobs", "prompt_logprobs")
        ),
        (structured(json_schema=DEEP), INVALID, "sampling.structured_outputs"),
        *((structured(regex=it), INVALID, "sampling.structured_outputs") for it in CATASTROPHIC),
        (structured(json_object=False), INVALID, "sampling.structured_outputs"),
        (structured(choice={"texts": [""] * 9}), INVALID, "sampling.structured_outputs"),
        (ChatRequest(model=MODEL, messages=[ChatMessage()] * 100_000), INVALID, "messages"),
        (
            ChatRequest(model=MODEL, messages=[ChatMessage(tool_calls=[ToolCall()] * 100_000)]),
            INVALID,
            "messages",
        ),
        (ChatRequest(model=MODEL, tools=[Tool()] * 100_000), INVALID, "tools"),
        (
            ChatRequest(model=MODEL, messages=[ChatMessage(role="user" * 10_000, content="")]),
            INVALID,
            "messages.0.role",
        ),
    ],
)
async def test_over_grpc(
    fleet: SimFleet, request_: Any, reason: ErrorReason, param: str | None
) -> None:
    async with AsyncClient(fleet.coordinator.addresses["grpc"]) as client:
        ask = client.chat if isinstance(request_, ChatRequest) else client.generate

        async def error() -> CallError:
            with pytest.raises(CallError) as caught:
                await ask(request_, timeout_s=WITHIN_S)
            return caught.value

        told = await quickly(error)
    assert (told.reason, told.param) == (reason, param)
    await fleet.until_idle()


async def test_text_that_is_no_utf8_over_grpc(fleet: SimFleet) -> None:
    damaged = generate("Hi").SerializeToString().replace(b"Hi", b"\xff\xfe")
    call = fleet.coordinator.channel.unary_unary("/pdserve.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(damaged)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
