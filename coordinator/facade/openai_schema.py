"""OpenAI's request bodies: what is accepted, and what it means in pdserve's own terms.

Types are strict and unknown fields refused, so that a typo is told and not ignored. A null
means that a field was not given, as OpenAI's clients send it. Ranges are checked later, in
`coordinator.facade.validate`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError

from coordinator.facade.unsupported import refuse_unsupported
from coordinator.facade.validate import COMPLETION_MAX_TOKENS, ParamNames
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokenPrompt

_MAX_PARAM_CHARS = 128
MODE = "x-pdserve-mode"
SESSION = "x-pdserve-session"
_HEADER_NAMES = {"session": SESSION, "mode": MODE}

# Tags of unions begin with "<": they are no part of the path that a client is told.
_STRINGS, _STRING, _IDS, _ID_LISTS, _PARTS = "<strings>", "<string>", "<ids>", "<lists>", "<parts>"


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return _STRING
    first = value[0] if value else ""
    if isinstance(first, list):
        return _ID_LISTS
    return _STRINGS if isinstance(first, str) else _IDS


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(_Body):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag(_STRING)] | Annotated[list[TextPart], Tag(_PARTS), FailFast()],
    Discriminator(lambda value: _PARTS if isinstance(value, list) else _STRING),
]
Stop = Annotated[
    Annotated[str, Tag(_STRING)] | Annotated[list[str], Tag(_STRINGS), FailFast()],
    Discriminator(lambda value: _STRINGS if isinstance(value, list) else _STRING),
]
TokenIdList = Annotated[list[int], FailFast()]
PromptField = Annotated[
    Annotated[str, Tag(_STRING)]
    | Annotated[list[str], Tag(_STRINGS), FailFast()]
    | Annotated[TokenIdList, Tag(_IDS)]
    | Annotated[list[TokenIdList], Tag(_ID_LISTS), FailFast()],
    Discriminator(_kind_of_prompt),
]


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @property
    def text(self) -> str:
        """Parts are joined as vLLM joins them."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationBody(_Body):
    """What chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None

    # As in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIdList | None = None
    cache_salt: str | None = None

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
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def param_names(self) -> ParamNames:
        """How this body calls what `GenerateSpec` and `SamplingParams` call otherwise."""
        return _HEADER_NAMES

    def to_prompt(self) -> Prompt:
        """Raises RejectedError for a prompt of a kind that is not supported yet."""
        raise NotImplementedError

    def to_sampling(self) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        asked = self.asked_max_tokens
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.top_k == -1:  # vLLM's other way to say "all"
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=self.default_max_tokens if asked is None else asked,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
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
)


class ChatCompletionRequest(GenerationBody):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None

    default_max_tokens: ClassVar[int | None] = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def param_names(self) -> ParamNames:
        if self.max_completion_tokens is None:
            return _HEADER_NAMES
        return {**_HEADER_NAMES, "max_tokens": "max_completion_tokens"}

    def to_prompt(self) -> Prompt:
        return ChatPrompt(
            tuple(
                ("system" if message.role == "developer" else message.role, message.text)
                for message in self.messages
            )
        )


class CompletionRequest(GenerationBody):
    prompt: PromptField
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    default_max_tokens: ClassVar[int | None] = COMPLETION_MAX_TOKENS

    def to_prompt(self) -> Prompt:
        prompt = self.prompt
        if isinstance(prompt, str):
            return TextPrompt(prompt)
        if not prompt or isinstance(prompt[0], int):
            return TokenPrompt(tuple(prompt))
        if len(prompt) > 1:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                "several prompts in one request are not supported yet",
                param="prompt",
            )
        only = prompt[0]
        return TextPrompt(only) if isinstance(only, str) else TokenPrompt(tuple(only))


Body = TypeVar("Body", bound=GenerationBody)


def parse(kind: type[Body], data: bytes) -> Body:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _rejected(first["loc"], first["msg"]) from None
    if body.stream_options is not None and not body.stream:
        raise _rejected(("stream_options",), "only allowed with stream=true")
    if body.max_tokens not in (None, body.asked_max_tokens):
        raise _rejected(("max_tokens",), "differs from max_completion_tokens")
    refuse_unsupported(body)
    return body


def _rejected(location: tuple[int | str, ...], message: str) -> RejectedError:
    path = ".".join(str(part) for part in location if not str(part).startswith("<"))
    param = path[:_MAX_PARAM_CHARS] or None
    told = message if param is None else f"{param}: {message}"
    return RejectedError(ErrorReason.INVALID_ARGUMENT, told, param=param)
