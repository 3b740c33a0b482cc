"""Answers chats and completions over HTTP: the token path, in plain ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from coordinator.facade.echo import Echo, echo_of, echoed
from coordinator.facade.http_errors import error_json, error_response
from coordinator.facade.http_wire import (
    WhileConnected,
    read_json_body,
    stopping,
    text_writer,
)
from coordinator.facade.intake import (
    Answer,
    Gathering,
    Intake,
    begin,
    ended_early,
    one_line,
    request_id_from,
    whole,
)
from coordinator.facade.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsShape
from coordinator.facade.openai_answer import Shapes, chat_completion, completion
from coordinator.facade.openai_schema import (
    MODE,
    SESSION,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    parse,
)
from coordinator.facade.parsed_sse import ParsedFrames
from coordinator.facade.ports import TokenStream
from coordinator.facade.several import Part, Several, parts_of, total
from coordinator.facade.sse import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    AnswerIdentity,
    ChunkShape,
    Frames,
    Shown,
    error_event,
)
from coordinator.gateway.keys import Caller
from coordinator.record import RequestRecord
from pdserve.errors import REQUEST_ID, ErrorReason, RejectedError
from pdserve.types import ChatPrompt, GenerateSpec, Mode, Route, SamplingParams, Usage


@dataclass(frozen=True, slots=True)
class Operation:
    """What sets chats and completions apart."""

    name: str
    body: type[GenerationBody]
    id_prefix: str
    chunk: ChunkShape
    logprobs: type[LogprobsShape]
    answer: Callable[[AnswerIdentity, Sequence[Answer], Shapes, Usage], dict[str, Any]]


CHAT = Operation(
    "chat", ChatCompletionRequest, "chatcmpl-", CHAT_CHUNK, ChatLogprobs, chat_completion
)
COMPLETION = Operation(
    "completion", CompletionRequest, "cmpl-", COMPLETION_CHUNK, CompletionLogprobs, completion
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was understood, whoever of its choices is meant."""

    caller: Caller
    body: GenerationBody
    identity: AnswerIdentity
    record: RequestRecord


class GenerationResponse(Response):
    """Does all the work of a request when it is sent; holds nothing of any one request.

    So one place has the client's connection in hand from the body to the last token,
    and each token goes from the dispatcher to the socket with nothing between.
    """

    background = None

    def __init__(self, intake: Intake, operation: Operation) -> None:
        self._intake = intake
        self.operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        record = begin(
            "http",
            self.operation.name,
            request_id_from(headers.get(REQUEST_ID)),
            headers.get("traceparent"),
        )
        try:
            await self._serve(headers, record, receive, send)
        except Exception as error:
            told = self._intake.failed(record, error)
            await error_response(told, record.request_id)(scope, receive, send)
        except BaseException as error:
            self._intake.failed(record, error)
            raise

    async def _serve(
        self, headers: Headers, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        caller = self._intake.authenticate(headers.get("authorization"))
        record.tenant = caller.tenant
        data = await read_json_body(headers, receive, self._intake.max_body_bytes)
        body = parse(self.operation.body, data)
        record.stream = bool(body.stream)
        defaults = self._intake.model(body.model).defaults
        spec = _spec(body, defaults.sampling, headers, record)
        identity = AnswerIdentity(
            id=self.operation.id_prefix + record.request_id,
            created=int(time.time()),
            model=body.model,
        )
        asked = _Asked(caller, body, identity, record)
        prompts, n = body.to_prompts(), body.n or 1
        async with WhileConnected(receive) as connection:
            if len(prompts) == n == 1:
                last = await self._one(asked, spec, send, connection)
            else:
                parts = [
                    replace(part, echo=await self._echo(body, part.spec))
                    for part in parts_of(spec, record, prompts, n)
                ]
                last = await self._several(asked, parts, send, connection)
        # Out here, for a complete response looks like a client that left.
        for message in last:
            await send(message)

    async def _one(
        self, asked: _Asked, spec: GenerateSpec, send: Send, connection: WhileConnected
    ) -> list[Message]:
        """Sends all but the last messages, which it returns."""
        record = asked.record
        echo = await self._echo(asked.body, spec)
        stream = echoed(
            await self._intake.open(spec, asked.caller, record, asked.body.param_names), echo
        )
        try:
            shape = self._shape(spec)
            if record.stream:
                frames = self._frames(asked, spec, stream.prompt_token_ids)
                return await self._stream(stream, frames, record, send, connection)
            answer = await whole(stream, token_ids=bool(asked.body.return_token_ids))
            content = self.operation.answer(asked.identity, [answer], [shape], answer.usage)
            return _complete(content, stream.route, record)
        finally:
            await stream.aclose()

    async def _several(
        self, asked: _Asked, parts: Sequence[Part], send: Send, connection: WhileConnected
    ) -> list[Message]:
        """As `_one`."""
        several = Several(self._intake, asked.caller, asked.body.param_names)
        try:
            await several.open(parts)
            if asked.record.stream:
                return await self._stream_several(asked, several, parts, send, connection)
            gatherings = [Gathering() for _ in parts]
            async for index, delta in several:
                gatherings[index].add(delta)
            shown = several.prompt_token_ids if asked.body.return_token_ids else {}
            answers = [one.answer(shown.get(index)) for index, one in enumerate(gatherings)]
            content = self.operation.answer(
                asked.identity,
                answers,
                [self._shape(part.spec) for part in parts],
                total(parts, [answer.usage for answer in answers]),
            )
            return _complete(content, several.route, asked.record)
        finally:
            await several.aclose()

    async def _echo(self, body: GenerationBody, spec: GenerateSpec) -> Echo | None:
        if not body.echoes:
            return None
        echo = await echo_of(spec, self._intake.model(spec.model).encoder, alone=body.echoes_alone)
        # As in vLLM: whoever asks for the tokens gets no text of the prompt.
        return replace(echo, text="") if body.return_token_ids else echo

    def _shape(self, spec: GenerateSpec) -> LogprobsShape | None:
        """How the log probabilities of one choice are shown, where they are."""
        prompt = spec.prompt
        hides = isinstance(prompt, ChatPrompt) and not prompt.include_reasoning
        if spec.sampling.logprobs is None or (hides and self._intake.chat_parser(spec)):
            return None
        return self.operation.logprobs(spec.sampling.logprobs)

    def _frames(
        self,
        asked: _Asked,
        spec: GenerateSpec,
        prompt_token_ids: Sequence[int],
        index: int = 0,
    ) -> Frames:
        body = asked.body
        parser = self._intake.chat_parser(spec)
        shown = Shown(
            body.include_usage,
            body.continuous_usage,
            bool(body.return_token_ids),
            parser is not None and parser.parses_reasoning,
            self._shape(spec),
        )
        kind = Frames if parser is None else ParsedFrames
        return kind(asked.identity, self.operation.chunk, shown, prompt_token_ids, index)

    async def _stream_several(
        self,
        asked: _Asked,
        several: Several,
        parts: Sequence[Part],
        send: Send,
        connection: WhileConnected,
    ) -> list[Message]:
        record = asked.record
        await send(_start(_EVENTS, several.route, record, *_UNBUFFERED))
        frames: dict[int, Frames] = {}
        usages: dict[int, Usage] = {}
        try:
            async for index, delta in several:
                if index not in frames:
                    prompt = several.prompt_token_ids[index]
                    frames[index] = self._frames(asked, parts[index].spec, prompt, index)
                    if opening := frames[index].opening:
                        await send(_body(opening, more=True))
                if delta.finish_reason is None:
                    event = frames[index].piece(delta)
                else:
                    assert delta.usage is not None
                    usages[index] = delta.usage
                    event = frames[index].last(delta)
                if event:
                    await send(_body(event, more=True))
            used = total(parts, [usages[index] for index in range(len(parts))])
            return [_body(frames[0].end(used))]
        except asyncio.CancelledError:
            if connection.client_left:
                raise
            return [self._broken(record, stopping())]
        except Exception as error:
            return [self._broken(record, error)]

    async def _stream(
        self,
        stream: TokenStream,
        frames: Frames,
        record: RequestRecord,
        send: Send,
        connection: WhileConnected,
    ) -> list[Message]:
        """Sends all but the last message, which it returns."""
        await send(_start(_EVENTS, stream.route, record, *_UNBUFFERED))
        try:
            if frames.opening:
                await send(_body(frames.opening, more=True))
            write = text_writer(send, frames.before, frames.after) if frames.is_plain else None
            if write is not None:
                stream.forward(write)
            async for delta in stream:
                if delta.finish_reason is not None:
                    return [_body(frames.closing(delta))]
                if event := frames.piece(delta):
                    await send(_body(event, more=True))
            raise ended_early()
        except asyncio.CancelledError:
            if connection.client_left:
                raise
            return [self._broken(record, stopping())]
        except Exception as error:
            return [self._broken(record, error)]

    def _broken(self, record: RequestRecord, error: Exception) -> Message:
        return _body(error_event(error_json(self._intake.failed(record, error))))


_EVENTS = b"text/event-stream; charset=utf-8"
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def _spec(
    body: GenerationBody, defaults: SamplingParams, headers: Headers, record: RequestRecord
) -> GenerateSpec:
    """Raises RejectedError for a prompt or a header that makes no sense."""
    return GenerateSpec(
        request_id=record.request_id,
        model=body.model,
        prompt=body.to_prompts()[0],
        sampling=body.to_sampling(defaults),
        mode=_mode(headers.get(MODE)),
        tenant=record.tenant,
        session=headers.get(SESSION, ""),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        truncation=body.truncation,
    )


def _mode(asked: str | None) -> Mode | None:
    if asked is None:
        return None
    try:
        return Mode(asked.strip().lower())
    except ValueError:
        raise RejectedError(
            ErrorReason.INVALID_ARGUMENT,
            f"{MODE} must be one of {', '.join(Mode)}",
            param=MODE,
        ) from None


def _complete(answer: dict[str, Any], route: Route, record: RequestRecord) -> list[Message]:
    content = orjson.dumps(answer)
    length = (b"content-length", b"%d" % len(content))
    return [_start(b"application/json", route, record, length), _body(content)]


def _start(
    media_type: bytes, route: Route, record: RequestRecord, *more: tuple[bytes, bytes]
) -> Message:
    headers = [
        (b"content-type", media_type),
        (REQUEST_ID.encode(), record.request_id.encode()),
        (MODE.encode(), route.mode.value.encode()),
        (b"x-pdserve-reason", one_line(route.reason).encode()),
        *more,
    ]
    if route.arm:
        headers.append((b"x-pdserve-arm", one_line(route.arm).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
