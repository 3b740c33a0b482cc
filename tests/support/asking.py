"""Ways to ask a simulated fleet: over HTTP and gRPC, for all at once or token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.prompts import ByteEncoder
from pdserve.config import SimConfig
from pdserve.engine import sim_model
from pdserve.types import Mode, Role, SamplingParams, TextPrompt
from pdserve.v1 import generation_pb2, inference_pb2
from tests.support.sim_fleet import (
    CONTEXT_LENGTH,
    FAST,
    MODEL,
    Answer,
    SimCoordinator,
    SimFleetWorker,
)

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
LONG_TEXT = TEXT * 4
MAX_TOKENS = 12
LONG_ANSWER = 3000
SLOW_READER = SimConfig(prefill_token_s=0.001, decode_step_s=0.001, chunk_tokens=16)
"""Takes most of a second to read LONG_TEXT, in short steps."""

Ask = Callable[[SimCoordinator, str, Mode], Coroutine[Any, Any, Answer]]


def prefill(worker_id: str = "p", sim: SimConfig = FAST) -> SimFleetWorker:
    return SimFleetWorker(worker_id, Role.PREFILL, sim=sim)


def decode(worker_id: str = "d", sim: SimConfig = FAST) -> SimFleetWorker:
    return SimFleetWorker(worker_id, Role.DECODE, sim=sim)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": text,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        **fields,
    }


def message(text: str, mode: Mode | None, max_tokens: int = MAX_TOKENS) -> Any:
    modes = {
        Mode.COLOCATED: generation_pb2.MODE_COLOCATED,
        Mode.DISAGGREGATED: generation_pb2.MODE_DISAGGREGATED,
        None: generation_pb2.MODE_UNSPECIFIED,
    }
    return inference_pb2.GenerateRequest(
        model=MODEL,
        text=text,
        sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
        options=inference_pb2.RequestOptions(mode=modes[mode]),
    )


def events(lines: list[str]) -> list[Any]:
    """The data of server-sent events; the closing [DONE] as it is."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def right_text(prompt: str, max_tokens: int) -> str:
    """What any run of a greedy request answers that goes on to `max_tokens`, by the simulated
    model itself."""
    tokens = ByteEncoder(CONTEXT_LENGTH).encode(TextPrompt(prompt))
    answer = sim_model.Answer(tokens, SamplingParams(temperature=0, ignore_eos=True), max_tokens)
    return "".join(answer.next()[1] for _ in range(max_tokens))


async def http_whole(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    response = await core.http.post(
        "/v1/completions", json=body(text), headers={"x-pdserve-mode": mode.value}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    used = answer["usage"]["completion_tokens"]
    return Answer(choice["text"], choice["finish_reason"], used, response.headers)


async def http_streamed(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    request = body(text, stream=True, stream_options={"include_usage": True})
    async with core.http.stream(
        "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode.value}
    ) as response:
        *chunks, usage, done = events([line async for line in response.aiter_lines()])
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    return Answer(
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["usage"]["completion_tokens"],
        response.headers,
    )


async def metadata_of(call: Any) -> dict[str, str]:
    return {key: str(value) for key, value in await call.initial_metadata()}


def finish_word(number: int) -> str:
    name = generation_pb2.FinishReason.Name(number)  # type: ignore[arg-type]
    return name.removeprefix("FINISH_REASON_").lower()


async def grpc_whole(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    call = core.grpc.Generate(message(text, mode))
    answer = await call
    return Answer(
        answer.text,
        finish_word(answer.finish_reason),
        answer.usage.completion_tokens,
        await metadata_of(call),
    )


async def grpc_streamed(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    request = inference_pb2.GenerateStreamRequest(request=message(text, mode))
    call = core.grpc.GenerateStream(request)
    pieces = [piece async for piece in call]
    last = pieces[-1]
    return Answer(
        "".join(piece.text for piece in pieces),
        finish_word(last.finish_reason),
        last.usage.completion_tokens,
        await metadata_of(call),
    )


ASKS = {
    "HTTP": http_whole,
    "HTTP, streamed": http_streamed,
    "gRPC": grpc_whole,
    "gRPC, streamed": grpc_streamed,
}
