"""What both façades do with a request between parsing it and having its answer."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import structlog
from opentelemetry import trace

from coordinator.catalog import ServedModel
from coordinator.facade.parsed import ParsedDelta, taken_apart
from coordinator.facade.ports import Dispatch, EndObserver, TokenStream
from coordinator.facade.validate import Limits, ParamNames, validate
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller
from coordinator.policy.ticket import Priority
from coordinator.record import RequestRecord
from pdserve.chat import AnsweredMessage, ChatPrompt, ToolMode
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.parsing import ChatParser
from pdserve.tracing import Place, caller_of, new_span_id, new_trace_id
from pdserve.types import Delta, FinishReason, GenerateSpec, PositionLogprobs, Usage

log = structlog.get_logger("facade")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_HEADER_CHARS = 256


class Intake:
    """The one way from a façade into the coordinator."""

    def __init__(self, dispatcher: Dispatch, gateway: Gateway, observer: EndObserver) -> None:
        self._dispatcher = dispatcher
        self._gateway = gateway
        self._observer = observer
        self._lane = asyncio.Semaphore(1)

    @property
    def models(self) -> Mapping[str, ServedModel]:
        return self._dispatcher.models

    @property
    def max_body_bytes(self) -> int:
        return self._gateway.max_body_bytes

    def authenticate(self, authorization: str | None) -> Caller:
        """Raises RejectedError UNAUTHENTICATED."""
        return self._gateway.authenticate(authorization)

    async def count(self, caller: Caller) -> None:
        """Counts a request that is answered here. Raises RejectedError RATE_LIMITED."""
        await self._gateway.count(caller)

    def model(self, name: str) -> ServedModel:
        """By its own name, or that of one of its adapters. Raises RejectedError MODEL_NOT_FOUND."""
        if (model := self.models.get(name)) is not None:
            return model
        for model in self.models.values():
            if name in model.config.lora:
                return replace(model, adapter=name)
        raise RejectedError(
            ErrorReason.MODEL_NOT_FOUND, "no such model is served here", param="model"
        )

    @property
    def names(self) -> list[str]:
        """Of models and adapters."""
        adapters = (name for model in self.models.values() for name in model.config.lora)
        return sorted([*self.models, *adapters])

    def turn(self, *, is_quick: bool) -> asyncio.Semaphore | nullcontext[None]:
        """Of work with a tokenizer for nobody's answer, to be entered: what is not quick is done
        one by one, so that prompts to be answered wait for one such at most."""
        return nullcontext() if is_quick else self._lane

    def chat_parser(self, spec: GenerateSpec) -> ChatParser | None:
        """What takes the answer apart; None where it is text alone. Raises as `model`."""
        parser, prompt = self.model(spec.model).chat_parser, spec.prompt
        takes_apart = parser and isinstance(prompt, ChatPrompt) and parser.takes_apart(prompt)
        return parser if takes_apart else None

    async def open(
        self, spec: GenerateSpec, caller: Caller, record: RequestRecord, names: ParamNames
    ) -> TokenStream:
        """Checks the request and returns its answer once it has begun; the caller closes it.

        Raises PdserveError.
        """
        model = self.model(spec.model)
        record.model = spec.lora or spec.model
        limits = Limits(model.context_length, model.encoder.vocab_size)
        validate(spec, limits, names)
        chosen = "mode" if spec.mode is not None else "arm" if spec.arm else ""
        if chosen and not (caller.may_choose_mode and model.config.mode_override):
            raise RejectedError(
                ErrorReason.PERMISSION_DENIED,
                f"this key or model does not let a request choose its {chosen}",
                param=names.get(chosen, chosen),
            )
        if spec.priority < 0 and caller.max_priority is not Priority.HIGH:
            raise RejectedError(
                ErrorReason.PERMISSION_DENIED,
                "this key does not let a request go before others: priority must be at least 0",
                param=names.get("priority", "priority"),
            )
        prompt = spec.prompt
        try:
            if not isinstance(prompt, ChatPrompt):
                return await self._dispatcher.open(spec, caller, record)
            if model.chat_parser is None or not model.chat_parser.parses_tools:
                _refuse_tools(prompt)
            parser = self.chat_parser(spec)
            if parser is None:
                return await self._dispatcher.open(spec, caller, record)
            return await self._open_parsed(parser, prompt, spec, caller, record)
        except PdserveError as error:
            if error.param is not None:
                error.param = names.get(error.param, error.param)
            raise

    async def _open_parsed(
        self,
        parser: ChatParser,
        prompt: ChatPrompt,
        spec: GenerateSpec,
        caller: Caller,
        record: RequestRecord,
    ) -> TokenStream:
        parsing, asked = parser.read(prompt, spec.sampling), spec.sampling.structured_outputs
        try:
            spec = replace(spec, sampling=parsing.sampling)
            stream = await self._dispatcher.open(spec, caller, record)
        except PdserveError as error:
            of_tools = parsing.sampling.structured_outputs != asked
            if error.param == "structured_outputs" and of_tools:
                error.param = "tools" if prompt.tool_choice is ToolMode.AUTO else "tool_choice"
            raise
        try:
            return taken_apart(parser, parsing, prompt, stream, record)
        except BaseException:
            await stream.aclose()
            raise

    def failed(self, record: RequestRecord, error: BaseException) -> PdserveError:
        """Reports the end of a request, unless that was done, and returns what to tell."""
        told = told_error(error)
        self._observer.done(record, told)
        return told


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a sequence had to give. Logprobs are by token, of the prompt from the second one
    on, and empty where not asked for. `prompt_token_ids` is None where no ids are to be shown,
    `message` where the text is not taken apart."""

    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    prompt_logprobs: list[PositionLogprobs]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    prompt_token_ids: tuple[int, ...] | None = None
    message: AnsweredMessage | None = None


class Gathering:
    """Makes an Answer of deltas."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._last: Delta | None = None

    def add(self, delta: Delta) -> bool:
        """Whether this was the last."""
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._prompt_logprobs += delta.prompt_logprobs or ()
        self._last = delta
        return delta.finish_reason is not None

    def answer(self, prompt_token_ids: tuple[int, ...] | None = None) -> Answer:
        """After the last delta."""
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        assert last.usage is not None
        return Answer(
            "".join(self._texts),
            self._token_ids,
            self._logprobs,
            self._prompt_logprobs,
            last.finish_reason,
            last.stop_reason,
            last.usage,
            prompt_token_ids,
            last.message if isinstance(last, ParsedDelta) else None,
        )


async def whole(stream: TokenStream, *, token_ids: bool = False) -> Answer:
    """Reads the stream to its end. Raises PdserveError."""
    gathering = Gathering()
    async for delta in stream:
        if gathering.add(delta):
            return gathering.answer(stream.prompt_token_ids if token_ids else None)
    raise ended_early()


def ended_early() -> PdserveError:
    return PdserveError(ErrorReason.INTERNAL, "the answer ended without a finish reason")


def begin(surface: str, operation: str, request_id: str, traceparent: str | None) -> RequestRecord:
    """The record of a request that arrives now, in its caller's trace or in one of its own."""
    caller = caller_of(traceparent)
    if caller is None:
        trace_id = new_trace_id()
        place: Place | None = Place(trace_id, new_span_id())
    else:
        trace_id = trace.format_trace_id(caller.trace_id)
        parent_id = trace.format_span_id(caller.span_id)
        place = Place(trace_id, new_span_id(), parent_id) if caller.trace_flags.sampled else None
    return RequestRecord(
        request_id=request_id,
        surface=surface,
        operation=operation,
        stream=False,
        trace_id=trace_id,
        received=time.monotonic(),
        place=place,
    )


def request_id_from(asked: str | None) -> str:
    """The client's own id where it is harmless in logs and headers, else a fresh one."""
    if asked is not None and _REQUEST_ID.fullmatch(asked):
        return asked
    return uuid.uuid4().hex


def one_line(words: str) -> str:
    """Words as a header or metadata value can carry them: printable ASCII, one line, not long."""
    ascii_words = words[:_MAX_HEADER_CHARS].encode("ascii", "replace").decode()
    return "".join(char if char.isprintable() else " " for char in ascii_words).strip()


def told_error(error: BaseException) -> PdserveError:
    """What a client is told: a fault of ours goes to the log, and nothing of it to the client."""
    if isinstance(error, PdserveError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return PdserveError(ErrorReason.CANCELLED, "the request was cancelled")
    log.error("request failed unexpectedly", exc_info=error)
    return PdserveError(ErrorReason.INTERNAL, "internal error")


def _refuse_tools(prompt: ChatPrompt) -> None:
    """Raises RejectedError INVALID_ARGUMENT where calls of tools would be looked for."""
    if prompt.tool_choice is not ToolMode.NONE:
        raise _rejected(
            "tool_choice: the model is served without a tool parser (--tool-parser); "
            "only none is possible",
            "tool_choice",
        )


def _rejected(words: str, param: str) -> RejectedError:
    return RejectedError(ErrorReason.INVALID_ARGUMENT, words, param=param)
