"""Asks one server for one case, by HTTP or gRPC, streamed or not."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import grpc
import httpx

from coordinator.facade.openai_schema import ChatCompletionRequest, CompletionRequest, parse
from pdserve.convert_chat import chat_to_proto
from pdserve.convert_sampling import sampling_to_proto
from pdserve.errors import ErrorReason
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import ChatPrompt, TextPrompt, TokenPrompt
from pdserve.v1 import generation_pb2 as gen
from pdserve.v1 import inference_pb2 as pb
from tests.conformance.cases import Case
from tests.conformance.named import NAMED
from tests.conformance.seen import Seen, calls_of, of_chosen
from tests.support.fleet import MODES

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
}
_SIDES = {
    None: pb.TRUNCATION_SIDE_UNSPECIFIED,
    "left": pb.TRUNCATION_SIDE_LEFT,
    "right": pb.TRUNCATION_SIDE_RIGHT,
}
_FINISH = {
    gen.FINISH_REASON_STOP: "stop",
    gen.FINISH_REASON_LENGTH: "length",
    gen.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def over_http(client: httpx.Client, model: str, case: Case, mode: str, *, stream: bool) -> Seen:
    """`mode` empty asks for none, of a server that knows none."""
    body = {"model": model, **case.body}
    if stream:
        body |= {"stream": True}
        if case.kind in ("chat", "completion"):
            body.setdefault("stream_options", {"include_usage": True})
    else:
        body.pop("stream_options", None)
    headers = {}
    if mode:
        # No prefix cache of the decode worker stands in for a hand-off.
        body["cache_salt"] = uuid4().hex
        headers["x-pdserve-mode"] = mode
    response = client.post(PATHS[case.kind], json=body, headers=headers)
    if response.status_code == 400:
        return Seen(refused=response.json()["error"].get("param") or "")
    response.raise_for_status()
    took = (
        response.headers.get("x-pdserve-mode", ""),
        response.headers.get("x-pdserve-reason", ""),
    )
    if case.kind in NAMED:
        return NAMED[case.kind](response, took)
    if not stream:
        answer = response.json()
        (choice,) = answer["choices"]
        return of_chosen([{**_of_answer(answer), **choice}], answer["usage"], took)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [{**_of_answer(chunk), **choice} for chunk in chunks for choice in chunk["choices"]]
    return of_chosen(choices, chunks[-1]["usage"], took)


def _of_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Chats have what is of the prompt beside their choices."""
    return {name: answer.get(name) for name in ("prompt_logprobs", "prompt_token_ids")}


def over_grpc(stub: Any, model: str, case: Case, mode: str, *, stream: bool) -> Seen:
    try:
        messages = _answers(stub, model, case, mode, stream)
    except grpc.RpcError as error:
        told = from_rpc_error(error, ErrorReason.DECODE_FAILED)
        assert told.reason is ErrorReason.INVALID_ARGUMENT, told
        return Seen(refused=told.param or "")
    last = messages[-1]
    texts = [one.message.content if hasattr(one, "message") else one.text for one in messages]
    of_prompt = sum(len(one.prompt_logprobs) for one in messages)
    prompt_ids = [token_id for one in messages for token_id in one.prompt_token_ids]
    ids = [token_id for one in messages for token_id in one.token_ids] if prompt_ids else []
    return Seen(
        text="".join(texts),
        calls=calls_of(_calls(messages)),
        finish_reason=_FINISH[last.finish_reason],
        usage=(last.usage.prompt_tokens, last.usage.completion_tokens),
        token_ids=(*prompt_ids, *ids),
        logprobs=tuple(at.candidates[0].logprob for one in messages for at in one.logprobs),
        # OpenAI's surface shows nothing in place of the first token's.
        num_prompt_logprobs=of_prompt + 1 if of_prompt else 0,
        mode={number: name for name, number in MODES.items()}[messages[0].route.mode],
        reason=messages[0].route.reason,
    )


def _calls(messages: list[Any]) -> list[tuple[int, dict[str, str | None]]]:
    """What is new of calls in each message, or the calls of a whole one."""
    found = []
    for one in messages:
        told = one.message if hasattr(one, "message") else one
        for index, call in enumerate(getattr(told, "tool_calls", ())):
            new = {"name": call.name, "arguments": call.arguments}
            found.append((getattr(call, "index", index), new))
    return found


def _answers(stub: Any, model: str, case: Case, mode: str, stream: bool) -> list[Any]:
    fields = {name: value for name, value in case.body.items() if name != "stream_options"}
    kind = ChatCompletionRequest if case.kind == "chat" else CompletionRequest
    body = parse(kind, json.dumps({"model": model, **fields}).encode())
    common: dict[str, Any] = {
        "model": model,
        "sampling": sampling_to_proto(body.to_sampling()),
        "options": pb.RequestOptions(mode=MODES[mode], cache_salt=uuid4().hex),
        "prompt_options": pb.PromptOptions(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=_SIDES[body.truncation_side],
            add_special_tokens=body.add_special_tokens,
            return_prompt_token_ids=bool(body.return_token_ids),
        ),
    }
    match body.to_prompts()[0]:
        case ChatPrompt() as prompt:
            chat = chat_to_proto(prompt)
            chat.MergeFrom(pb.ChatRequest(**common))
            if stream:
                return list(stub.ChatStream(pb.ChatStreamRequest(request=chat)))
            return [stub.Chat(chat)]
        case TextPrompt(text):
            asked = pb.GenerateRequest(text=text, **common)
        case TokenPrompt(token_ids):
            asked = pb.GenerateRequest(token_ids=gen.TokenIds(ids=token_ids), **common)
    if stream:
        return list(stub.GenerateStream(pb.GenerateStreamRequest(request=asked)))
    return [stub.Generate(asked)]
