"""OpenAI's Responses, without state: what is accepted, and the chat that it is here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from coordinator.facade.body import decode, rejected
from coordinator.facade.openai_chat import MessageBody, ReasoningEffort
from coordinator.facade.openai_schema import ChatCompletionRequest
from coordinator.facade.openai_structured import JsonSchemaFormat, ResponseFormat
from coordinator.facade.validate import MAX_MESSAGES, ParamNames

LOGPROBS = "message.output_text.logprobs"


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class InputPart(_Body, kw_only=True):
    """Of a message, or of a model's reasoning that is sent back."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(_Body, kw_only=True):
    """A message, or a model's reasoning. Items of an answer may be sent back as they were."""

    type: Literal["message", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    summary: list[InputPart] | None = None
    encrypted_content: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class TextFormat(_Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(_Body, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(_Body, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: None = None


class ResponsesStreamOptions(_Body, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(_Body, kw_only=True):
    model: str
    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # As in vLLM.
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None

    # Accepted, and without effect.
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    # Known, and refused where they ask for something.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_tool_calls: int | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises RejectedError for what a server without state, or tools, cannot honour."""
        for name in ("store", "previous_response_id", "conversation", "background", "prompt"):
            if getattr(self, name):
                words = "nothing is kept here between requests, send the whole conversation"
                raise rejected(f"{name}: {words}", name)
        if self.tools or self.max_tool_calls or self.tool_choice not in (None, "none", "auto"):
            raise rejected("tools: they are not supported here, use chat completions", "tools")
        if self.top_logprobs and not self.shows_logprobs:
            raise rejected(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")


_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("skip_special_tokens", "include_stop_str_in_output", "chat_template_kwargs"),
    *("cache_salt", "priority", "top_logprobs"),
)
"""What chats call by the same name."""


class ResponsesChat(ChatCompletionRequest, kw_only=True):
    """A chat that came as a request for a response."""

    asked: ResponsesRequest

    @property
    def param_names(self) -> ParamNames:
        return {
            **super().param_names,
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "structured_outputs": "text.format",
            "truncate_prompt_tokens": "truncation",
            "reasoning_effort": "reasoning.effort",
        }


def read_responses(data: bytes) -> ResponsesChat:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    asked = decode(ResponsesRequest, data)
    asked.check()
    goes_on = _goes_on(asked.input)
    chat = ResponsesChat(
        asked=asked,
        messages=_messages(asked),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        max_completion_tokens=asked.max_output_tokens,
        logprobs=asked.shows_logprobs,
        response_format=_format(asked.text),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        truncate_prompt_tokens=-1 if asked.truncation == "auto" else None,
        **{name: getattr(asked, name) for name in _SAME},
    )
    chat.check()
    return chat


def _messages(asked: ResponsesRequest) -> list[MessageBody]:
    """Reasoning belongs to the assistant's message after it."""
    messages: list[MessageBody] = []
    if asked.instructions is not None:
        messages.append(MessageBody(role="system", content=asked.instructions))
    if isinstance(asked.input, str):
        return [*messages, MessageBody(role="user", content=asked.input)]
    thought: list[str] = []
    for index, item in enumerate(asked.input):
        if item.type == "reasoning":
            thought.append(item.text)
            continue
        if item.role is None or item.content is None:
            missing = "role" if item.role is None else "content"
            raise rejected(f"input.{index}.{missing} is missing", f"input.{index}.{missing}")
        is_own = item.role == "assistant" and thought
        reasoning = "\n".join(thought) if is_own else None
        messages.append(MessageBody(role=item.role, content=item.text, reasoning=reasoning))
        thought = []
    return messages


def _goes_on(given: str | list[InputItem]) -> bool:
    """As in vLLM: a last message of the assistant's that is not complete is gone on with."""
    if isinstance(given, str) or not given:
        return False
    last = given[-1]
    return last.role == "assistant" and last.status in ("in_progress", "incomplete")


def _format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    asked = text.format
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.schema is None:
        raise rejected("text.format.schema is missing", "text.format.schema")
    schema = JsonSchemaFormat(name=asked.name or "", schema=asked.schema, strict=asked.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
