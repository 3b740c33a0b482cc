"""A client of one request over any surface, and what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from pdserve.errors import ErrorReason
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import Mode
from pdserve.v1 import generation_pb2, inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.asking import events, right_text
from tests.support.sim_fleet import MODEL

if TYPE_CHECKING:
    from pdserve.v1.inference_pb2_grpc import InferenceServiceAsyncStub

ANSWERED = "answered"
BROKEN = "broken"
PROMPT_TOKENS = 96
_MODES = {
    Mode.COLOCATED: generation_pb2.MODE_COLOCATED,
    Mode.DISAGGREGATED: generation_pb2.MODE_DISAGGREGATED,
}


@dataclass(frozen=True)
class Doors:
    """Both ways into one coordinator."""

    http: httpx.AsyncClient
    grpc: InferenceServiceAsyncStub


@asynccontextmanager
async def doors(http: str, grpc_address: str) -> AsyncIterator[Doors]:
    """Of clients that wait for as long as the driver does."""
    base = f"http://{http}"
    async with (
        httpx.AsyncClient(base_url=base, trust_env=False, timeout=None) as client,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        yield Doors(client, InferenceServiceStub(channel))


@dataclass(frozen=True)
class Told:
    """`how` is ANSWERED, BROKEN or a reason's label; `status` an HTTP status or a gRPC code's
    name, as far as there was one; `reason` says which way the answer came."""

    how: str
    status: str
    text: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Question:
    """`request_id` begins the prompt, so that no two have a block or an answer in common."""

    request_id: str
    surface: str
    mode: Mode
    max_tokens: int
    deadline_s: float | None = None

    @property
    def prompt(self) -> str:
        return f"{self.request_id} ".ljust(PROMPT_TOKENS, "x")[:PROMPT_TOKENS]

    @property
    def right_text(self) -> str:
        return right_text(self.prompt, self.max_tokens)


class Client:
    """Asks at once. `pieces` counts the parts of the answer that have come."""

    def __init__(self, where: Doors, question: Question) -> None:
        self.question = question
        self.pieces = 0
        self._doors = where
        self._text: list[str] = []
        ask = self._http if question.surface.startswith("http") else self._grpc
        self._task = asyncio.create_task(ask(question.surface.endswith("stream")))

    @property
    def done(self) -> bool:
        return self._task.done()

    async def leave(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def told(self) -> Told:
        return await self._task

    async def _http(self, stream: bool) -> Told:
        question = self.question
        body = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        headers = {"x-pdserve-mode": question.mode.value, "x-request-id": question.request_id}
        status = ""
        try:
            async with self._doors.http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                status = str(response.status_code)
                if stream and response.status_code == 200:
                    return await self._read_events(response)
                answer = json.loads(await response.aread())
        except httpx.TransportError:
            return Told(BROKEN, status)
        if "error" in answer:
            return Told(answer["error"]["code"], status)
        text = answer["choices"][0]["text"]
        return Told(ANSWERED, status, text, response.headers["x-pdserve-reason"])

    async def _read_events(self, response: httpx.Response) -> Told:
        async for line in response.aiter_lines():
            for event in events([line]):
                if event == "[DONE]":
                    reason = response.headers["x-pdserve-reason"]
                    return Told(ANSWERED, "200", "".join(self._text), reason)
                if "error" in event:
                    return Told(event["error"]["code"], "200", "".join(self._text))
                self._text.append(event["choices"][0]["text"])
                self.pieces += 1
        return Told("an end without [DONE]", "200", "".join(self._text))

    async def _grpc(self, stream: bool) -> Told:
        question = self.question
        message = inference_pb2.GenerateRequest(
            model=MODEL,
            text=question.prompt,
            sampling=generation_pb2.SamplingParams(
                max_tokens=question.max_tokens, temperature=0, ignore_eos=True
            ),
            options=inference_pb2.RequestOptions(mode=_MODES[question.mode]),
        )
        stub, timeout = self._doors.grpc, question.deadline_s
        metadata = (("x-request-id", question.request_id),)
        call: Any
        if stream:
            asked = inference_pb2.GenerateStreamRequest(request=message)
            call = stub.GenerateStream(asked, metadata=metadata, timeout=timeout)
        else:
            call = stub.Generate(message, metadata=metadata, timeout=timeout)
        try:
            if not stream:
                self._text.append((await call).text)
            else:
                async for piece in call:
                    self._text.append(piece.text)
                    self.pieces += 1
            reason = dict(await call.initial_metadata())["x-pdserve-reason"]
            return Told(ANSWERED, "OK", "".join(self._text), reason)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code == "UNAVAILABLE" and "ErrorInfo" not in str(error.trailing_metadata()):
                return Told(BROKEN, code)
            told = from_rpc_error(error, ErrorReason.INTERNAL)
            return Told(told.reason.label, code, "".join(self._text))
        finally:
            call.cancel()
