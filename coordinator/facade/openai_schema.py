"""OpenAI's request bodies: what is accepted, and what it means in pdserve's own terms.

Types are strict and unknown fields refused, so that a typo is told and not ignored. A null
means that a field was not given, as OpenAI's clients send it. Ranges are checked later, in
`coordinator.facade.validate`.

msgspec and not pydantic, for it stops at the first fault: a body of 4 MiB with a fault in
every element holds the event loop, and so every token stream, for seconds otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar, cast

import msgspec

from coordinator.facade.body import decode, rejected
from coordinator.facade.openai_chat import (
    Conversation,
    ReasoningEffort,
    ToolChoiceBody,
    Tools,
    choice_of,
    messages_of,
    tools_of,
)
from coordinator.facade.openai_structured import (
    ResponseFormat,
    StructuredOutputsBody,
    constraint_of,
)
from coordinator.facade.unsupported import refuse_unsupported
from coordinator.facade.validate import COMPLETION_MAX_TOKENS, ParamNames
from pdserve.types import (
    ChatPrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

MODE = "x-pdserve-mode"
SESSION = "x-pdserve-session"
ARM = "x-pdserve-arm"

_NAMES = {
    "session": SESSION,
    "arm": ARM,
    "mode": MODE,
    "template_kwargs": "chat_template_kwargs",
}

MAX_CHOICES = 128
"""Of one request, over all its prompts."""


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class StreamOptions(_Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body, kw_only=True):
    """What chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None

    # As in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsBody | None = None
    cache_salt: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    # Accepted, and without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    default_max_tokens: ClassVar[int | None]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with its prompt."""
        return False

    @property
    def echoes_alone(self) -> bool:
        """Whether the prompt is all there is to show."""
        return False

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def truncation(self) -> Truncation | None:
        tokens = self.truncate_prompt_tokens
        return None if tokens is None else Truncation(tokens, self.truncation_side)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """So many of the likeliest tokens beside each one's own; None for neither."""
        raise NotImplementedError

    @property
    def param_names(self) -> ParamNames:
        """How this body calls what `GenerateSpec` and `SamplingParams` call otherwise."""
        if self.structured_outputs is None:
            return {**_NAMES, "structured_outputs": "response_format"}
        return _NAMES

    def check(self) -> None:
        """Raises RejectedError for fields that contradict one another."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise rejected(f"n must be between 1 and {MAX_CHOICES}", "n")
        # Before anything is made of each: a body has room for a million prompts.
        if self.num_prompts * (self.n or 1) > MAX_CHOICES:
            words = f"a request may have at most {MAX_CHOICES} choices over all its prompts"
            raise rejected(words, "prompt")
        if self.stream and self.prompt_logprobs is not None:
            raise rejected("prompt_logprobs is only allowed without stream", "prompt_logprobs")
        if self.allowed_token_ids == []:
            raise rejected("allowed_token_ids leaves no token", "allowed_token_ids")

    @property
    def num_prompts(self) -> int:
        """As many as `to_prompts` gives."""
        return 1

    def to_prompts(self) -> list[Prompt]:
        """At least one; each is answered by itself. Raises RejectedError for a mixed list."""
        raise NotImplementedError

    def to_sampling(self, defaults: SamplingParams = SamplingParams()) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        asked = self.asked_max_tokens
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.top_k == -1:  # vLLM's other way to say "all"
            given["top_k"] = 0
        return replace(
            defaults,
            max_tokens=self.default_max_tokens if asked is None else asked,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=self.asked_logprobs,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            structured_outputs=constraint_of(self.response_format, self.structured_outputs),
            **given,
        )


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


class ChatCompletionRequest(GenerationBody, kw_only=True):
    messages: Conversation
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    # As in vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None

    default_max_tokens: ClassVar[int | None] = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def param_names(self) -> ParamNames:
        names = {**super().param_names, "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise rejected("top_logprobs is only allowed with logprobs=true", "top_logprobs")

    def to_prompts(self) -> list[Prompt]:
        tools = tools_of(self.tools)
        return [
            ChatPrompt(
                messages=messages_of(self.messages),
                tools=tools,
                tool_choice=choice_of(self.tool_choice, bool(tools)),
                parallel_tool_calls=self.parallel_tool_calls is not False,
                include_reasoning=self.include_reasoning is not False,
                reasoning_effort=self.reasoning_effort or "",
                add_generation_prompt=self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
                template_kwargs=self.chat_template_kwargs or {},
                add_special_tokens=bool(self.add_special_tokens),
            )
        ]


class CompletionRequest(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    default_max_tokens: ClassVar[int | None] = COMPLETION_MAX_TOKENS

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def echoes_alone(self) -> bool:
        return self.echoes and self.max_tokens == 0

    def to_sampling(self, defaults: SamplingParams = SamplingParams()) -> SamplingParams:
        sampling = super().to_sampling(defaults)
        if self.echoes and self.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=self.logprobs)
        # As in vLLM, a token is written all the same, and not shown.
        return replace(sampling, max_tokens=1) if self.echoes_alone else sampling

    @property
    def num_prompts(self) -> int:
        prompt = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return 1 if is_one else len(prompt)

    def to_prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [self._text(prompt)]
        if all(isinstance(item, int) for item in prompt):
            return [TokenPrompt(tuple(cast(list[int], prompt)))]
        if any(isinstance(item, int) for item in prompt):
            raise rejected("prompt mixes token ids with prompts", "prompt")
        return [
            self._text(one) if isinstance(one, str) else TokenPrompt(tuple(one))
            for one in cast(list[str | list[int]], prompt)
        ]

    def _text(self, text: str) -> TextPrompt:
        return TextPrompt(text, add_special_tokens=self.add_special_tokens is not False)


Body = TypeVar("Body", bound=GenerationBody)


def parse(kind: type[Body], data: bytes) -> Body:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    body = decode(kind, data)
    if body.stream_options is not None and not body.stream:
        raise rejected("stream_options is only allowed with stream=true", "stream_options")
    if body.max_tokens not in (None, body.asked_max_tokens):
        raise rejected("max_tokens differs from max_completion_tokens", "max_tokens")
    body.check()
    refuse_unsupported(body)
    return body
