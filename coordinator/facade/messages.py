"""Anthropic's Messages: what is accepted, and the chat that it is here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from coordinator.facade.body import decode, rejected
from coordinator.facade.openai_chat import MessageBody
from coordinator.facade.openai_schema import ChatCompletionRequest
from coordinator.facade.validate import MAX_MESSAGES, ParamNames


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class TextBlock(_Body, kw_only=True, tag_field="type", tag="text"):
    """`cache_control` has no effect: prefixes are cached without it."""

    text: str
    cache_control: Any = None
    citations: None = None


class ThinkingBlock(_Body, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought, sent back."""

    thinking: str
    signature: str | None = None


class Turn(_Body, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock]


class ThinkingConfig(_Body, kw_only=True):
    """A budget of tokens to think with cannot be held to, and is refused."""

    type: Literal["disabled", "adaptive"]
    display: Any = None


class Metadata(_Body, kw_only=True):
    user_id: str | None = None


class MessagesRequest(_Body, kw_only=True):
    model: str
    messages: Annotated[list[Turn], msgspec.Meta(max_length=MAX_MESSAGES)]
    max_tokens: int
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: ThinkingConfig | None = None

    # As in vLLM.
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    # Accepted, and without effect.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    # Known, and refused where they ask for something.
    tools: list[Any] | None = None
    tool_choice: Any = None


_SAME = (
    *("model", "max_tokens", "stream", "temperature", "top_p", "top_k"),
    *("chat_template_kwargs", "cache_salt"),
)
"""What chats call by the same name."""


class MessagesChat(ChatCompletionRequest, kw_only=True):
    """A chat that came as a request for a message."""

    @property
    def param_names(self) -> ParamNames:
        return {**super().param_names, "stop": "stop_sequences", "reasoning_effort": "thinking"}


def read_messages(data: bytes) -> MessagesChat:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    asked = decode(MessagesRequest, data)
    if asked.tools or (asked.tool_choice or {"type": "none"}) != {"type": "none"}:
        raise rejected("tools: they are not supported here, use chat completions", "tools")
    turns = [
        MessageBody(role=turn.role, content=_text(turn), reasoning=_thought(turn))
        for turn in asked.messages
    ]
    if asked.system is not None:
        turns.insert(0, MessageBody(role="system", content=_joined(asked.system)))
    # An answer that the client has begun is gone on with.
    goes_on = turns[-1].role == "assistant" if turns else False
    disabled = asked.thinking is not None and asked.thinking.type == "disabled"
    chat = MessagesChat(
        messages=turns,
        stop=asked.stop_sequences,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        reasoning_effort="none" if disabled else None,
        **{name: getattr(asked, name) for name in _SAME},
    )
    chat.check()
    return chat


def _text(turn: Turn) -> str:
    if isinstance(turn.content, str):
        return turn.content
    return _joined([block for block in turn.content if isinstance(block, TextBlock)])


def _thought(turn: Turn) -> str | None:
    if isinstance(turn.content, str):
        return None
    blocks = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    return "\n".join(blocks) if blocks else None


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
