"""Answers whatever asks for text over HTTP: the token path, in plain ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from coordinator.catalog import ServedModel
from coordinator.facade.echo import Echo, echo_of, echoed
from coordinator.facade.http_wire import (
    WhileConnected,
    read_json_body,
    stopping,
    text_writer,
)
from coordinator.facade.intake import (
    Gathering,
    Intake,
    begin,
    ended_early,
    one_line,
    request_id_from,
    whole,
)
from coordinator.facade.openai_schema import (
    ARM,
    MODE,
    SESSION,
    GenerationBody,
)
from coordinator.facade.operation import Asked, Events, Operation
from coordinator.facade.ports import TokenStream
from coordinator.facade.several import Part, Several, parts_of, total
from coordinator.facade.sse import (
    AnswerIdentity,
)
from coordinator.record import RequestRecord
from pdserve.errors import REQUEST_ID, ErrorReason, RejectedError
from pdserve.types import GenerateSpec, Mode, Prompt, Route, Usage


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
            await self.operation.refusal(told, record.request_id)(scope, receive, send)
        except BaseException as error:
            self._intake.failed(record, error)
            raise

    async def _serve(
        self, headers: Headers, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        caller = self._intake.authenticate(self.operation.authorization(headers))
        record.tenant, record.key_id = caller.tenant, caller.key_id
        data = await read_json_body(headers, receive, self._intake.max_body_bytes)
        body = self.operation.read(data)
        record.stream = bool(body.stream)
        model = self._intake.model(body.model)
        prompts, n = body.to_prompts(), body.n or 1
        spec = _spec(body, prompts[0], model, headers, record)
        identity = AnswerIdentity(
            id=self.operation.id_prefix + record.request_id,
            created=int(time.time()),
            model=body.model,
        )
        asked = Asked(caller, body, identity, record, spec, self._intake.chat_parser(spec))
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
        self, asked: Asked, spec: GenerateSpec, send: Send, connection: WhileConnected
    ) -> list[Message]:
        """Sends all but the last messages, which it returns."""
        record = asked.record
        echo = await self._echo(asked.body, spec)
        stream = echoed(
            await self._intake.open(spec, asked.caller, record, asked.body.param_names), echo
        )
        try:
            if record.stream:
                events = self.operation.events(asked, stream.prompt_token_ids, 0)
                return await self._stream(stream, events, record, send, connection)
            answer = await whole(stream, token_ids=bool(asked.body.return_token_ids))
            content = self.operation.answer(asked, [answer], answer.usage)
            return _complete(content, stream.route, record)
        finally:
            await stream.aclose()

    async def _several(
        self, asked: Asked, parts: Sequence[Part], send: Send, connection: WhileConnected
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
            usage = total(parts, [answer.usage for answer in answers])
            content = self.operation.answer(asked, answers, usage)
            return _complete(content, several.route, asked.record)
        finally:
            await several.aclose()

    async def _echo(self, body: GenerationBody, spec: GenerateSpec) -> Echo | None:
        if not body.echoes:
            return None
        echo = await echo_of(spec, self._intake.model(spec.model).encoder, alone=body.echoes_alone)
        # As in vLLM: whoever asks for the tokens gets no text of the prompt.
        return replace(echo, text="") if body.return_token_ids else echo

    async def _stream_several(
        self,
        asked: Asked,
        several: Several,
        parts: Sequence[Part],
        send: Send,
        connection: WhileConnected,
    ) -> list[Message]:
        record = asked.record
        await send(_start(_EVENTS, several.route, record, *_UNBUFFERED))
        events: dict[int, Events] = {}
        usages: dict[int, Usage] = {}
        try:
            async for index, delta in several:
                if index not in events:
                    prompt = several.prompt_token_ids[index]
                    events[index] = self.operation.events(asked, prompt, index)
                    if opening := events[index].opening:
                        await send(_body(opening, more=True))
                if delta.finish_reason is None:
                    event = events[index].piece(delta)
                else:
                    assert delta.usage is not None
                    usages[index] = delta.usage
                    event = events[index].last(delta)
                if event:
                    await send(_body(event, more=True))
            used = total(parts, [usages[index] for index in range(len(parts))])
            return [_body(events[0].end(used))]
        except asyncio.CancelledError:
            if connection.client_left:
                raise
            return [self._broken(next(iter(events.values())), record, stopping())]
        except Exception as error:
            return [self._broken(next(iter(events.values())), record, error)]

    async def _stream(
        self,
        stream: TokenStream,
        events: Events,
        record: RequestRecord,
        send: Send,
        connection: WhileConnected,
    ) -> list[Message]:
        """Sends all but the last message, which it returns."""
        await send(_start(_EVENTS, stream.route, record, *_UNBUFFERED))
        try:
            if opening := events.opening:
                await send(_body(opening, more=True))
            write = text_writer(send, events.before, events.after) if events.is_plain else None
            if write is not None:
                stream.forward(write)
            async for delta in stream:
                if delta.finish_reason is not None:
                    assert delta.usage is not None
                    return [_body(events.last(delta) + events.end(delta.usage))]
                if event := events.piece(delta):
                    await send(_body(event, more=True))
            raise ended_early()
        except asyncio.CancelledError:
            if connection.client_left:
                raise
            return [self._broken(events, record, stopping())]
        except Exception as error:
            return [self._broken(events, record, error)]

    def _broken(self, events: Events, record: RequestRecord, error: Exception) -> Message:
        return _body(events.broken(self._intake.failed(record, error)))


_EVENTS = b"text/event-stream; charset=utf-8"
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def _spec(
    body: GenerationBody,
    prompt: Prompt,
    model: ServedModel,
    headers: Headers,
    record: RequestRecord,
) -> GenerateSpec:
    """Raises RejectedError for a header that makes no sense."""
    return GenerateSpec(
        request_id=record.request_id,
        model=model.config.name,
        prompt=prompt,
        sampling=body.to_sampling(model.defaults.sampling),
        mode=_mode(headers.get(MODE)),
        tenant=record.tenant,
        session=headers.get(SESSION, ""),
        arm=headers.get(ARM, ""),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        truncation=body.truncation,
        lora=model.adapter,
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
        headers.append((ARM.encode(), one_line(route.arm).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
