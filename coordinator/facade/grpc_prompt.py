"""What a gRPC request says of its prompt, in pdserve's own terms."""

from __future__ import annotations

from typing import Literal

from coordinator.facade.validate import MAX_MESSAGES, MAX_TOOLS
from pdserve.convert_chat import chat_from_proto
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Prompt, TextPrompt, TokenPrompt, Truncation
from pdserve.v1 import inference_pb2 as pb

NAMES = {
    "truncate_prompt_tokens": "prompt_options.truncate_prompt_tokens",
    "continue_final_message": "template.continue_final_message",
    "template_kwargs": "template.kwargs",
}
_SIDES: dict[int, Literal["left", "right"] | None] = {
    pb.TRUNCATION_SIDE_UNSPECIFIED: None,
    pb.TRUNCATION_SIDE_LEFT: "left",
    pb.TRUNCATION_SIDE_RIGHT: "right",
}


def prompt_of(request: pb.GenerateRequest | pb.ChatRequest) -> Prompt:
    """Raises RejectedError for one that is not there or says nothing."""
    if isinstance(request, pb.ChatRequest):
        # Before anything is made of each: a message has room for hundreds of thousands.
        said = len(request.messages)
        if said <= MAX_MESSAGES:
            said += sum(len(one.tool_calls) for one in request.messages)
        if said > MAX_MESSAGES:
            words = f"messages and their tool_calls may be {MAX_MESSAGES} together"
            raise _rejected(words, "messages")
        if len(request.tools) > MAX_TOOLS:
            raise _rejected(f"tools may be {MAX_TOOLS} at most", "tools")
        return chat_from_proto(request)
    match request.WhichOneof("prompt"):
        case "text":
            options = request.prompt_options
            adds = options.add_special_tokens or not options.HasField("add_special_tokens")
            return TextPrompt(request.text, add_special_tokens=adds)
        case "token_ids":
            return TokenPrompt(tuple(request.token_ids.ids))
        case _:
            raise _rejected("text or token_ids must be set", "prompt")


def truncation_of(options: pb.PromptOptions) -> Truncation | None:
    if not options.HasField("truncate_prompt_tokens"):
        return None
    side = options.truncation_side
    if side not in _SIDES:
        raise _rejected("truncation_side is unknown", "prompt_options.truncation_side")
    return Truncation(options.truncate_prompt_tokens, _SIDES[side])


def _rejected(words: str, param: str) -> RejectedError:
    return RejectedError(ErrorReason.INVALID_ARGUMENT, words, param=param)
