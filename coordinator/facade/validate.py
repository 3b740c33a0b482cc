"""The ranges of a request, checked once, for both façades, on the parsed spec."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.facade.constraints import fault_of
from pdserve.chat import NamedTool, ToolMode
from pdserve.errors import ErrorReason, RejectedError
from pdserve.structured import JsonSchema
from pdserve.types import (
    WHOLE_CONTEXT,
    ChatPrompt,
    GenerateSpec,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

COMPLETION_MAX_TOKENS = 16
"""Answer of a completion that names no `max_tokens`, as OpenAI and vLLM have it."""

MAX_STOP = 16
MAX_TOKEN_IDS = 1024
"""Of a request, in each of its lists of them."""

MAX_BAD_WORDS = 128
MAX_LABEL_CHARS = 256
"""Longest session, arm and cache salt."""

MAX_MESSAGES = 4096
"""Of a conversation, the calls of tools in them among it: each is looked at one by one."""

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 * 1024
"""Of the parameters of all tools, which may become one structure of the answer."""


MAX_TEMPLATE_BYTES = 64 * 1024
"""Of the values for a chat template, as JSON."""

RESERVED_KWARGS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "self", "raise_exception", "strftime_now"),
        *(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        "additional_special_tokens",
    }
)
"""What renders a template, and is no client's to set: parameters, functions, special tokens."""


ParamNames = Mapping[str, str]
"""How a façade calls the fields of `GenerateSpec` and `SamplingParams`, where not the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model allows: tokens of prompt and answer together, and ids below `vocab_size`."""

    context_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    words: str
    low_excluded: bool = False

    def has(self, value: float) -> bool:
        """False for NaN and, the bounds being finite, for infinities."""
        return self.low <= value <= self.high and not (self.low_excluded and value == self.low)


_PRIORITY = _Range(-(2**31), 2**31 - 1, "a 32-bit integer")
_BIAS = _Range(-100, 100, "between -100 and 100")
_PENALTY = _Range(-2, 2, "between -2 and 2")
_RANGES = {
    "temperature": _Range(0, 2, "between 0 and 2"),
    "top_p": _Range(0, 1, "above 0 and at most 1", low_excluded=True),
    "top_k": _Range(0, 2**31 - 1, "0 or a 31-bit number above it"),
    "min_p": _Range(0, 1, "between 0 and 1"),
    "seed": _Range(-(2**63), 2**63 - 1, "a 64-bit integer"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Range(0, sys.float_info.max, "above 0", low_excluded=True),
    "logprobs": _Range(0, 20, "between 0 and 20"),
    "prompt_logprobs": _Range(0, 20, "between 0 and 20"),
}


def validate(spec: GenerateSpec, limits: Limits, names: ParamNames) -> None:
    """Raises RejectedError INVALID_ARGUMENT with the façade's own name of the field.

    Whether prompt and answer fit the context together is known only after tokenisation
    and not checked here.
    """
    check = _Checker(names)
    _prompt(spec.prompt, check)
    if spec.truncation is not None:
        _truncation(spec.truncation, limits, check)
    _sampling(spec.sampling, limits, check)
    check("priority", _PRIORITY.has(spec.priority), _PRIORITY.words)
    labels = {"session": spec.session, "arm": spec.arm, "cache_salt": spec.cache_salt}
    for field, label in labels.items():
        check(field, len(label) <= MAX_LABEL_CHARS, f"at most {MAX_LABEL_CHARS} characters long")


def validate_prompt(prompt: Prompt, names: ParamNames) -> None:
    """As `validate`, for a prompt that nothing is to be answered to."""
    _prompt(prompt, _Checker(names))


def validate_sampling(params: SamplingParams, limits: Limits) -> None:
    """As `validate`, for values that are no request's."""
    _sampling(params, limits, _Checker({}))


class _Checker:
    def __init__(self, names: ParamNames) -> None:
        self._names = names

    def __call__(self, field: str, good: bool, words: str) -> None:
        if not good:
            param = self._names.get(field, field)
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT, f"{param} must be {words}", param=param
            )


def _prompt(prompt: Prompt, check: _Checker) -> None:
    match prompt:
        case ChatPrompt():
            _chat(prompt, check)
        case TextPrompt(text):
            check("prompt", bool(text), "a text that is not empty")
        case TokenPrompt(token_ids):
            check("prompt", bool(token_ids), "at least one token id")


def _chat(prompt: ChatPrompt, check: _Checker) -> None:
    check("messages", bool(prompt.messages), "at least one message")
    _template(prompt, check)
    for index, message in enumerate(prompt.messages):
        check(f"messages.{index}.role", message.role in ROLES, f"one of {', '.join(ROLES)}")
    check("tools", len(prompt.tools) <= MAX_TOOLS, f"at most {MAX_TOOLS}")
    for index, tool in enumerate(prompt.tools):
        place = f"tools.{index}"
        named = 0 < len(tool.name) <= MAX_LABEL_CHARS
        check(place, named, f"a function with a name of at most {MAX_LABEL_CHARS} characters")
        fault = None if tool.parameters is None else fault_of(JsonSchema(tool.parameters))
        check(place, fault is None, f"a function whose parameters are {fault}")
    size = sum(len(tool.parameters or "") for tool in prompt.tools)
    check("tools", size <= MAX_TOOLS_CHARS, f"at most {MAX_TOOLS_CHARS} characters together")
    choice = prompt.tool_choice
    check("tool_choice", choice is ToolMode.NONE or bool(prompt.tools), "left out without tools")
    effort = prompt.reasoning_effort
    check("reasoning_effort", effort in ("", *EFFORTS), f"one of {', '.join(EFFORTS)}")
    if isinstance(choice, NamedTool):
        names = {tool.name for tool in prompt.tools}
        check("tool_choice", choice.name in names, "the name of one of the tools")


def _template(prompt: ChatPrompt, check: _Checker) -> None:
    check(
        "continue_final_message",
        not (prompt.continue_final_message and prompt.add_generation_prompt),
        "used with add_generation_prompt=false",
    )
    if prompt.template_kwargs:
        reserved = sorted(RESERVED_KWARGS & prompt.template_kwargs.keys())
        check("template_kwargs", not reserved, f"without {', '.join(reserved)}")
        size = _json_bytes(prompt.template_kwargs)
        check("template_kwargs", size <= MAX_TEMPLATE_BYTES, f"at most {MAX_TEMPLATE_BYTES} bytes")


def _json_bytes(values: Mapping[str, Any]) -> float:
    """Infinite for what is nested too deeply."""
    try:
        return len(msgspec.json.encode(values))
    except RecursionError:
        return math.inf


def _truncation(truncation: Truncation, limits: Limits, check: _Checker) -> None:
    context = limits.context_length
    tokens = truncation.tokens
    check(
        "truncate_prompt_tokens",
        tokens == WHOLE_CONTEXT or 1 <= tokens <= context,
        f"between 1 and the context of {context}, or {WHOLE_CONTEXT} for what fits",
    )


def _sampling(params: SamplingParams, limits: Limits, check: _Checker) -> None:
    for field, allowed in _RANGES.items():
        value = getattr(params, field)
        check(field, value is None or allowed.has(value), allowed.words)
    context = limits.context_length
    max_tokens = context if params.max_tokens is None else params.max_tokens
    check("max_tokens", 1 <= max_tokens <= context, f"between 1 and the context of {context}")
    check("min_tokens", 0 <= params.min_tokens <= max_tokens, f"between 0 and {max_tokens}")
    check("stop", len(params.stop) <= MAX_STOP, f"at most {MAX_STOP} texts")
    check("stop", all(params.stop), "texts that are not empty")
    check("bad_words", len(params.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} texts")
    check("bad_words", all(params.bad_words), "texts that are not empty")
    _token_ids("stop_token_ids", params.stop_token_ids, limits, check)
    _token_ids("allowed_token_ids", params.allowed_token_ids, limits, check)
    _token_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias), limits, check)
    check("logit_bias", all(_BIAS.has(value) for _, value in params.logit_bias), _BIAS.words)
    constraint = params.structured_outputs
    fault = None if constraint is None else fault_of(constraint)
    check("structured_outputs", fault is None, fault or "")


def _token_ids(field: str, ids: tuple[int, ...], limits: Limits, check: _Checker) -> None:
    check(field, len(ids) <= MAX_TOKEN_IDS, f"at most {MAX_TOKEN_IDS} tokens")
    check(
        field,
        all(0 <= token_id < limits.vocab_size for token_id in ids),
        f"ids of the vocabulary, below {limits.vocab_size}",
    )
