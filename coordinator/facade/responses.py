"""OpenAI's Responses, without state: what is accepted, and the chat that it is here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from coordinator.facade.body import decode, rejected
from coordinator.facade.openai_chat import (
    CalledFunction,
    FunctionBody,
    FunctionName,
    MessageBody,
    MessageToolCall,
    NamedToolChoice,
    ReasoningEffort,
    ToolBody,
    ToolChoiceBody,
)
from coordinator.facade.openai_schema import ChatCompletionRequest
from coordinator.facade.openai_structured import JsonSchemaFormat, ResponseFormat
from coordinator.facade.validate import MAX_MESSAGES, MAX_TOOLS, ParamNames

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
    """A message, a model's reasoning, its call of a function, or the result of that. Items of an
    answer may be sent back as they were."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    summary: list[InputPart] | None = None
    encrypted_content: None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @property
    def text(self) -> str:
        said = self.output if self.type == "function_call_output" else self.content
        return said if isinstance(said, str) else "\n".join(part.text for part in said or ())

    def check(self, place: str) -> None:
        """Raises RejectedError where something of its type is missing, or is another type's."""
        needed, of_any = _FIELDS[self.type], set().union(*_FIELDS.values())
        for name in needed:
            if getattr(self, name) is None:
                raise rejected(f"{place}.{name} is missing", f"{place}.{name}")
        for name in sorted(of_any - set(needed) - {"content"}):
            if getattr(self, name) is not None:
                words = f"{place}.{name} does not belong to the type {self.type}"
                raise rejected(words, f"{place}.{name}")


_FIELDS = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


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


class FunctionTool(_Body, kw_only=True):
    """One that the client runs; there are no others here."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(_Body, kw_only=True):
    type: Literal["function"]
    name: str


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
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None

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

    # Known, and refused where they ask for something.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises RejectedError for what a server without state, or tools of its own, cannot
        honour."""
        for name in ("store", "previous_response_id", "conversation", "background", "prompt"):
            if getattr(self, name):
                words = "nothing is kept here between requests, send the whole conversation"
                raise rejected(f"{name}: {words}", name)
        if self.max_tool_calls is not None:
            raise rejected("max_tool_calls: no tools are run here", "max_tool_calls")
        if self.top_logprobs and not self.shows_logprobs:
            raise rejected(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")


_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("skip_special_tokens", "include_stop_str_in_output", "chat_template_kwargs"),
    *("cache_salt", "priority", "top_logprobs", "parallel_tool_calls"),
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
        tools=[_tool(tool) for tool in asked.tools or ()] or None,
        tool_choice=_choice(asked),
        truncate_prompt_tokens=-1 if asked.truncation == "auto" else None,
        **{name: getattr(asked, name) for name in _SAME},
    )
    chat.check()
    return chat


def _messages(asked: ResponsesRequest) -> list[MessageBody]:
    """Reasoning belongs to the assistant's message after it; calls to that which was before, and
    make one where there was none, as in vLLM."""
    messages: list[MessageBody] = []
    if asked.instructions is not None:
        messages.append(MessageBody(role="system", content=asked.instructions))
    if isinstance(asked.input, str):
        return [*messages, MessageBody(role="user", content=asked.input)]
    thought: list[str] = []
    for index, item in enumerate(asked.input):
        item.check(f"input.{index}")
        if item.type == "reasoning":
            thought.append(item.text)
            continue
        if item.type == "function_call" and not thought and _is_own(messages):
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), _call(item)]
            continue
        message = _message(item)
        if message.role == "assistant" and not thought and _is_own(messages, silent=True):
            messages[-1].content = message.content
            continue
        if message.role == "assistant" and thought:
            message.reasoning = "\n".join(thought)
        messages.append(message)
        thought = []
    return messages


def _is_own(messages: list[MessageBody], *, silent: bool = False) -> bool:
    """Whether the last one is the model's; and, if asked, has calls alone."""
    if not messages or messages[-1].role != "assistant":
        return False
    return not silent or messages[-1].content is None


def _message(item: InputItem) -> MessageBody:
    if item.type == "function_call":
        return MessageBody(role="assistant", tool_calls=[_call(item)])
    if item.type == "function_call_output":
        return MessageBody(role="tool", content=item.text, tool_call_id=item.call_id)
    assert item.role is not None
    return MessageBody(role=item.role, content=item.text)


def _call(item: InputItem) -> MessageToolCall:
    function = CalledFunction(name=item.name or "", arguments=item.arguments or "")
    return MessageToolCall(id=item.call_id or "", function=function)


def _tool(tool: FunctionTool) -> ToolBody:
    return ToolBody(
        function=FunctionBody(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _choice(asked: ResponsesRequest) -> ToolChoiceBody | None:
    choice = asked.tool_choice
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(function=FunctionName(name=choice.name))
    # Clients say that they leave it to the model also where it has no tools.
    return None if choice == "auto" and not asked.tools else choice


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
