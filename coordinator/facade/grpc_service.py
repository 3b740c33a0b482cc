"""The public gRPC service, over the same intake as HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import TypeVar, cast

from coordinator.catalog import ServedModel
from coordinator.facade.grpc_prompt import NAMES, prompt_of, truncation_of
from coordinator.facade.intake import Intake, begin, ended_early, one_line, request_id_from, whole
from coordinator.facade.openai_schema import ARM
from coordinator.facade.parsed import ParsedDelta
from coordinator.facade.ports import Dispatch, EndObserver, TokenStream
from coordinator.facade.validate import COMPLETION_MAX_TOKENS
from coordinator.gateway.gateway import Gateway
from coordinator.record import RequestRecord
from pdserve import convert
from pdserve.chat import AnsweredMessage
from pdserve.convert_chat import answered_to_proto, calls_to_proto
from pdserve.convert_sampling import logprobs_to_proto, sampling_from_proto
from pdserve.errors import REQUEST_ID
from pdserve.rpc_errors import Context
from pdserve.types import Delta, GenerateSpec, Route, SamplingParams
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceServicer

_NAMES = (
    NAMES
    | {field.name: f"sampling.{field.name}" for field in fields(SamplingParams)}
    | {name: f"options.{name}" for name in ("mode", "session", "arm", "cache_salt", "priority")}
)
_Request = pb.GenerateRequest | pb.ChatRequest
_Message = TypeVar("_Message", pb.GenerateStreamResponse, pb.ChatStreamResponse)


class InferenceServicer(InferenceServiceServicer):
    """Raises PdserveError out of every method; an interceptor makes the status of it."""

    def __init__(self, dispatcher: Dispatch, gateway: Gateway, observer: EndObserver) -> None:
        self._intake = Intake(dispatcher, gateway, observer)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._answer(request, context) as (request_id, stream):
            answer = await whole(stream, token_ids=request.prompt_options.return_prompt_token_ids)
            return pb.GenerateResponse(
                id=request_id,
                text=answer.text,
                finish_reason=convert.finish_to_proto(answer.finish_reason),
                usage=convert.usage_to_proto(answer.usage),
                route=convert.route_to_proto(stream.route),
                logprobs=logprobs_to_proto(answer.logprobs),
                prompt_logprobs=logprobs_to_proto(answer.prompt_logprobs),
                token_ids=answer.token_ids,
                prompt_token_ids=answer.prompt_token_ids,
            )

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        async with self._answer(request, context) as (request_id, stream):
            answer = await whole(stream, token_ids=request.prompt_options.return_prompt_token_ids)
            return pb.ChatResponse(
                id=request_id,
                message=answered_to_proto(answer.message or AnsweredMessage(answer.text)),
                finish_reason=convert.finish_to_proto(answer.finish_reason),
                usage=convert.usage_to_proto(answer.usage),
                route=convert.route_to_proto(stream.route),
                logprobs=logprobs_to_proto(answer.logprobs),
                prompt_logprobs=logprobs_to_proto(answer.prompt_logprobs),
                token_ids=answer.token_ids,
                prompt_token_ids=answer.prompt_token_ids,
            )

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with self._answer(request.request, context, streamed=True) as (_, stream):
            first = _first(request.request, stream, pb.GenerateStreamResponse)
            async for message in _messages(stream, first, pb.GenerateStreamResponse):
                yield message

    async def ChatStream(
        self, request: pb.ChatStreamRequest, context: Context
    ) -> AsyncIterator[pb.ChatStreamResponse]:
        async with self._answer(request.request, context, streamed=True) as (_, stream):
            first = _first(request.request, stream, pb.ChatStreamResponse)
            async for message in _messages(stream, first, pb.ChatStreamResponse):
                yield message

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        metadata = _metadata(context)
        request_id = request_id_from(metadata.get(REQUEST_ID))
        context.set_trailing_metadata(((REQUEST_ID, request_id),))
        self._intake.authenticate(metadata.get("authorization"))
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        models = [(name, self._intake.model(name)) for name in self._intake.names]
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=name,
                    context_length=model.context_length,
                    parent=model.config.name if model.adapter else "",
                )
                for name, model in models
            ]
        )

    @asynccontextmanager
    async def _answer(
        self, request: _Request, context: Context, *, streamed: bool = False
    ) -> AsyncIterator[tuple[str, TokenStream]]:
        """The id and the tokens of a request, whose end is taken care of, whatever it is."""
        metadata = _metadata(context)
        record = begin(
            "grpc",
            "chat" if isinstance(request, pb.ChatRequest) else "completion",
            request_id_from(metadata.get(REQUEST_ID)),
            metadata.get("traceparent"),
        )
        record.stream = streamed
        # Of a call that fails. Metadata before that would keep gRPC's clients from trying again.
        context.set_trailing_metadata(((REQUEST_ID, record.request_id),))
        stream: TokenStream | None = None
        try:
            caller = self._intake.authenticate(metadata.get("authorization"))
            record.tenant, record.key_id = caller.tenant, caller.key_id
            spec = _spec(request, self._intake.model(request.model), record, context)
            stream = await self._intake.open(spec, caller, record, _NAMES)
            await context.send_initial_metadata(_route_metadata(record, stream.route))
            yield record.request_id, stream
        except BaseException as error:
            told = self._intake.failed(record, error)
            if not isinstance(error, Exception):
                raise
            raise told from None
        finally:
            if stream is not None:
                await stream.aclose()


def _first(request: _Request, stream: TokenStream, make: Callable[..., _Message]) -> _Message:
    shows = request.prompt_options.return_prompt_token_ids
    return make(
        route=convert.route_to_proto(stream.route),
        prompt_token_ids=stream.prompt_token_ids if shows else (),
    )


async def _messages(
    stream: TokenStream, message: _Message, make: Callable[..., _Message]
) -> AsyncIterator[_Message]:
    """`message` is the first."""
    is_first = True
    async for delta in stream:
        if delta.logprobs:
            message.logprobs.extend(logprobs_to_proto(delta.logprobs))
        if delta.prompt_logprobs:
            message.prompt_logprobs.extend(logprobs_to_proto(delta.prompt_logprobs))
        message.token_ids.extend(delta.token_ids)
        shows = _add_text(message, delta)
        if delta.finish_reason is not None:
            assert delta.usage is not None
            message.finish_reason = convert.finish_to_proto(delta.finish_reason)
            message.usage.CopyFrom(convert.usage_to_proto(delta.usage))
            await stream.aclose()  # what the client is told it used has been charged
            yield message
            return
        if shows or delta.logprobs or is_first:
            yield message
            message = make()
            is_first = False
    raise ended_early()


def _add_text(message: _Message, delta: Delta) -> bool:
    """Whether there was anything to add."""
    if not isinstance(delta, ParsedDelta):
        message.text = delta.text
        return bool(delta.text)
    if delta.delta is None:
        return False
    assert isinstance(message, pb.ChatStreamResponse)
    message.text = delta.delta.content or ""
    message.reasoning = delta.delta.reasoning or ""
    message.tool_calls.extend(calls_to_proto(delta.delta))
    return True


def _metadata(context: Context) -> dict[str, str]:
    """The call's metadata in text; of a repeated key the last."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _route_metadata(record: RequestRecord, route: Route) -> tuple[tuple[str, str], ...]:
    arm = ((ARM, one_line(route.arm)),) if route.arm else ()
    return (
        (REQUEST_ID, record.request_id),
        ("x-pdserve-mode", route.mode.value),
        ("x-pdserve-reason", one_line(route.reason)),
        *arm,
    )


def _spec(
    request: _Request, model: ServedModel, record: RequestRecord, context: Context
) -> GenerateSpec:
    """Raises PdserveError for what no dataclass can hold."""
    sampling = sampling_from_proto(request.sampling, model.defaults.sampling)
    if isinstance(request, pb.GenerateRequest) and sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=COMPLETION_MAX_TOKENS)
    # None without a deadline, whatever its type says.
    remaining = cast(float | None, context.time_remaining())
    return GenerateSpec(
        request_id=record.request_id,
        model=model.config.name,
        prompt=prompt_of(request),
        sampling=sampling,
        mode=convert.mode_from_proto(request.options.mode),
        tenant=record.tenant,
        session=request.options.session,
        arm=request.options.arm,
        cache_salt=request.options.cache_salt,
        priority=request.options.priority,
        deadline=None if remaining is None else time.monotonic() + remaining,
        truncation=truncation_of(request.prompt_options),
        lora=model.adapter,
    )
