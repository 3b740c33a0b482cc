"""Answers of chats, taken apart as vLLM's own server does: reasoning, text, calls of tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from coordinator.facade.ports import TokenStream
from coordinator.record import RequestRecord
from pdserve.chat import AnsweredMessage, ChatPrompt, MessageDelta, NamedTool, ToolMode
from pdserve.parsing import AnswerParser, ChatParser, ChatParsing
from pdserve.types import Delta, FinishReason, Usage


@dataclass(slots=True)
class ParsedDelta(Delta):
    """`delta` is what a piece of the answer brings, None for nothing yet; `message`, of the last
    piece of one that is answered whole, all of it. `text` is that of the model, markup included.

    `so_far` are the tokens of the answer, shown or not.
    """

    delta: MessageDelta | None = None
    message: AnsweredMessage | None = None
    so_far: SoFar = field(kw_only=True)


def brought(delta: Delta) -> MessageDelta:
    """What a piece of an answer brings, whether it was taken apart or not."""
    if isinstance(delta, ParsedDelta):
        return delta.delta or MessageDelta()
    return MessageDelta(content=delta.text)


class SoFar:
    """What was answered until now."""

    def __init__(self, parser: AnswerParser, *, tells_reasoning: bool) -> None:
        self.token_ids: list[int] = []
        self._parser = parser
        self._tells_reasoning = tells_reasoning

    @property
    def reasoning_tokens(self) -> int | None:
        """None where the model has no parser that tells them apart; counted at each call."""
        return self._parser.reasoning_tokens(self.token_ids) if self._tells_reasoning else None

    def usage(self, usage: Usage) -> Usage:
        return replace(usage, reasoning_tokens=self.reasoning_tokens)


class Pieces:
    """Takes an answer apart as it comes."""

    def __init__(self, parser: AnswerParser, prompt: ChatPrompt, so_far: SoFar) -> None:
        self._parser = parser
        self._prompt = prompt
        self._so_far = so_far
        self._calls = False

    def __call__(self, came: Delta) -> ParsedDelta:
        prompt = self._prompt
        self._so_far.token_ids += came.token_ids
        last = came.finish_reason is not None
        delta = self._parser.piece(came.text, came.token_ids, last=last)
        if delta is not None:
            self._calls |= bool(delta.tool_calls)
            if not prompt.parallel_tool_calls:
                first = tuple(call for call in delta.tool_calls if call.index == 0)
                delta = replace(delta, tool_calls=first)
        shown = _shown(came, prompt, self._so_far)
        shown.delta = delta
        is_call = self._calls and not isinstance(prompt.tool_choice, NamedTool)
        if is_call and came.finish_reason is FinishReason.STOP:
            shown.finish_reason = FinishReason.TOOL_CALLS
        return shown


class Whole:
    """Takes an answer apart once it is there."""

    def __init__(
        self, parser: AnswerParser, prompt: ChatPrompt, so_far: SoFar, *, parses_tools: bool
    ) -> None:
        self._parser = parser
        self._prompt = prompt
        self._so_far = so_far
        self._parses_tools = parses_tools
        self._texts: list[str] = []

    def __call__(self, came: Delta) -> ParsedDelta:
        self._texts.append(came.text)
        self._so_far.token_ids += came.token_ids
        shown = _shown(came, self._prompt, self._so_far)
        if came.finish_reason is not None:
            message = self._parser.whole("".join(self._texts), self._so_far.token_ids)
            shown.message, calls = self._chosen(message)
            required = self._prompt.tool_choice is ToolMode.REQUIRED
            if calls or (required and came.finish_reason is FinishReason.STOP):
                shown.finish_reason = FinishReason.TOOL_CALLS
        return shown

    def _chosen(self, message: AnsweredMessage) -> tuple[AnsweredMessage, bool]:
        """As the request asks for it; and whether the model chose to call tools."""
        prompt = self._prompt
        choice = prompt.tool_choice
        if not prompt.include_reasoning:
            message = replace(message, reasoning=None)
        if choice is ToolMode.NONE or not (self._parses_tools and prompt.tools):
            return replace(message, tool_calls=()), False
        calls = message.tool_calls
        chosen = choice is ToolMode.AUTO and bool(calls)
        if choice is not ToolMode.AUTO:
            message = replace(message, content=message.content or "")
        if not prompt.parallel_tool_calls:
            calls = calls[:1]
        return replace(message, tool_calls=calls), chosen


def _shown(came: Delta, prompt: ChatPrompt, so_far: SoFar) -> ParsedDelta:
    """Of hidden reasoning no token is shown, nor how likely it was."""
    hidden = not prompt.include_reasoning
    return ParsedDelta(
        came.text,
        [] if hidden else came.token_ids,
        came.finish_reason,
        None if came.usage is None else so_far.usage(came.usage),
        came.timings,
        None if hidden else came.logprobs,
        came.prompt_logprobs,
        came.stop_reason,
        so_far=so_far,
    )


def taken_apart(
    parser: ChatParser,
    parsing: ChatParsing,
    prompt: ChatPrompt,
    stream: TokenStream,
    record: RequestRecord,
) -> Parsed:
    """The answer to `prompt`, in pieces where it is streamed, or as a whole with its last delta."""
    answer = parsing.parser(stream.prompt_token_ids)
    so_far = SoFar(answer, tells_reasoning=parser.parses_reasoning)
    if record.stream:
        return Parsed(stream, Pieces(answer, prompt, so_far), record)
    whole = Whole(answer, prompt, so_far, parses_tools=parser.parses_tools)
    return Parsed(stream, whole, record)


class Parsed:
    """A TokenStream of ParsedDelta. It tells the record of the tokens that were reasoning."""

    def __init__(
        self,
        stream: TokenStream,
        take_apart: Callable[[Delta], ParsedDelta],
        record: RequestRecord,
    ) -> None:
        self._record = record
        self._stream = stream
        self._take_apart = take_apart
        self.route = stream.route
        self.prompt_token_ids = stream.prompt_token_ids

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> ParsedDelta:
        delta = self._take_apart(await anext(aiter(self._stream)))
        if delta.usage is not None:
            self._record.usage = delta.usage
        return delta

    def forward(self, write: Callable[[str], bool]) -> None:
        """Nothing can be written before it was taken apart."""

    async def aclose(self) -> None:
        await self._stream.aclose()
