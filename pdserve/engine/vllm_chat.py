"""vLLM's own parsers of tools and reasoning, at work without an engine.

They are vLLM's (0.32) to the letter: what is asked of them, and in which order, follows its
`OpenAIServingChat` and `OnlineRenderer`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdserve.chat import (
    AnsweredMessage,
    ChatPrompt,
    MessageDelta,
    NamedTool,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolMode,
)
from pdserve.config import ModelConfig
from pdserve.engine.vllm_sampling import structured_from_vllm, structured_to_vllm
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.sampling import SamplingParams

_NOT_HERE = {"kimi_k3", "openai", "openai_gptoss"}
"""Parsers of models whose prompts vLLM's server does not make with their chat template alone."""


class VllmChatParser:
    """Parses the answers of one model."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """Takes seconds. Raises ConfigError without vLLM, and for parsers that it has not, or
        not for this model."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # A coordinator's own events are on the other stream.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            from vllm.parser.abstract_parser import DelegatingParser
            from vllm.parser.parser_manager import ParserManager
            from vllm.reasoning import ReasoningParserManager
            from vllm.tokenizers import cached_get_tokenizer
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"model {config.name}: tool_parser and reasoning_parser are vLLM's, which is not "
                f"installed with the coordinator ({error}): install it, or leave them out"
            ) from None
        for setting, has in (
            ("tool_parser", ToolParserManager.list_registered()),
            ("reasoning_parser", ReasoningParserManager.list_registered()),
        ):
            named, known = getattr(config, setting), sorted(set(has) - _NOT_HERE)
            if named is not None and named not in known:
                raise ConfigError(
                    f"model {config.name}: no {setting} {named!r}: use {', '.join(known)}"
                )
        self.parses_tools = config.tool_parser is not None
        self.parses_reasoning = config.reasoning_parser is not None
        self.tokenizer = cached_get_tokenizer(str(folder))
        self._model = _model_of(folder)
        try:
            self._kind = ParserManager.get_parser(
                tool_parser_name=config.tool_parser,
                reasoning_parser_name=config.reasoning_parser,
                enable_auto_tools=self.parses_tools,
                model_name=str(folder),
                tokenizer=self.tokenizer,
            )
        except TypeError as error:
            raise ConfigError(f"model {config.name}: {error}") from None
        # Where no tool is to be called, vLLM's usual composition of parsers hands text on, unless
        # one of them is a grammar of the whole answer.
        self._passes_text = (
            not self.parses_reasoning
            and self._kind.__bases__ == (DelegatingParser,)
            and not self._kind.tool_parser_cls.engine_based_streaming
        )

    def takes_apart(self, prompt: ChatPrompt) -> bool:
        asks = prompt.tool_choice is not ToolMode.NONE or not prompt.include_reasoning
        return asks or not self._passes_text

    def read(self, prompt: ChatPrompt, sampling: SamplingParams) -> VllmChatParsing:
        request = _request(prompt, sampling)
        adjusts = (
            self._kind.always_adjust_request
            or self.parses_reasoning
            or prompt.tool_choice is not ToolMode.NONE
        )
        if adjusts:
            try:
                request = self.make(request).adjust_request(request)
            except ValueError as error:
                raise RejectedError(
                    ErrorReason.INVALID_ARGUMENT,
                    f"tools: no answer can be held to them: {error}",
                    param="tools",
                ) from None
        return VllmChatParsing(self, request, sampling)

    def make(self, request: Any) -> Any:
        """A parser as vLLM has it, for one answer."""
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        return self._kind(
            self.tokenizer,
            request.tools,
            chat_template_kwargs=kwargs,
            model_config=self._model,
        )


class VllmChatParsing:
    def __init__(self, parser: VllmChatParser, request: Any, asked: SamplingParams) -> None:
        self._parser = parser
        self._request = request
        constraint = asked.structured_outputs
        if request.structured_outputs is not None:
            constraint = structured_from_vllm(request.structured_outputs)
        # What vLLM's server says by `reasoning_ended`.
        at_once = not request.include_reasoning or request._grammar_from_parser
        self.sampling = replace(
            asked,
            structured_outputs=constraint,
            skip_special_tokens=request.skip_special_tokens,
            constrain_reasoning=asked.constrain_reasoning or at_once,
        )

    def parser(self, prompt_token_ids: Sequence[int]) -> VllmAnswerParser:
        parser = self._parser.make(self._request)
        return VllmAnswerParser(parser, self._request, self._parser.parses_tools, prompt_token_ids)


class VllmAnswerParser:
    def __init__(
        self, parser: Any, request: Any, parses_tools: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._parser = parser
        self._request = request
        self._parses_tools = parses_tools
        self._prompt = list(prompt_token_ids)

    def piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> MessageDelta | None:
        delta = self._parser.parse_delta(
            text, list(token_ids), self._request, self._prompt, finished=last
        )
        if delta is None:
            return None
        return MessageDelta(
            delta.content, delta.reasoning, tuple(map(_call_delta, delta.tool_calls))
        )

    def whole(self, text: str, token_ids: Sequence[int]) -> AnsweredMessage:
        from vllm.renderers.chat_utils import make_tool_call_id

        self._parser.set_prompt_token_ids(self._prompt)
        reasoning, content, calls = self._parser.parse(
            text, self._request, self._parses_tools, tuple(token_ids)
        )
        return AnsweredMessage(
            content,
            reasoning,
            tuple(
                ToolCall(call.id or make_tool_call_id(), call.name, call.arguments)
                for call in calls or ()
            ),
        )

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return int(self._parser.count_reasoning_tokens(tuple(token_ids)))


def _call_delta(call: Any) -> ToolCallDelta:
    function = call.function
    if function is None:
        return ToolCallDelta(call.index, call.id)
    return ToolCallDelta(call.index, call.id, function.name, function.arguments)


def _request(prompt: ChatPrompt, sampling: SamplingParams) -> Any:
    """vLLM's request, as far as parsers look at it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    choice = prompt.tool_choice
    request = ChatCompletionRequest(
        # Of what was said they count the calls of tools.
        messages=[
            {"role": "assistant", "content": "", "tool_calls": [_call(c) for c in one.tool_calls]}
            for one in prompt.messages
            if one.tool_calls
        ],
        tools=[_tool(tool) for tool in prompt.tools] or None,
        tool_choice=(
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedTool)
            else choice.value
        ),
        parallel_tool_calls=prompt.parallel_tool_calls,
        include_reasoning=prompt.include_reasoning,
        reasoning_effort=prompt.reasoning_effort or None,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template_kwargs=dict(prompt.template_kwargs) or None,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    if sampling.structured_outputs is not None:
        request.structured_outputs = structured_to_vllm(sampling.structured_outputs)
    return request


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    parameters = None if tool.parameters is None else json.loads(tool.parameters)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _model_of(folder: Path) -> Any:
    """As much of vLLM's ModelConfig as parsers look at."""
    config = json.loads((folder / "config.json").read_bytes())
    text = config.get("text_config", config)
    return SimpleNamespace(
        hf_overrides=None,
        hf_config=SimpleNamespace(model_type=config.get("model_type")),
        hf_text_config=SimpleNamespace(model_type=text.get("model_type")),
        architecture=next(iter(config.get("architectures") or ()), None),
    )
