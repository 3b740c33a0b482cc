"""What is tried: a parameter, with a request that shows whether it is honoured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.prompts import begun_again

PROMPT = begun_again(50, 6, 2)
"""The model repeats it: no near ties."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": CITY, "strict": True},
    },
]
NAMED = {"type": "function", "function": {"name": "weather"}}
IN_PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
"""What there is to call a tool with is told without a near tie."""
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "What is the weather like in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "It is sunny."},
]


@dataclass(frozen=True, eq=False)
class Case:
    """`fields` are added to a greedy request of 8 tokens. `streamed` says whether OpenAI's
    surface has it in streams, `grpc` whether that of gRPC has it."""

    name: str
    kind: Literal["chat", "completion", "response", "message"] = "completion"
    fields: dict[str, Any] = field(default_factory=dict)
    streamed: bool = True
    grpc: bool = True

    @property
    def body(self) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"Repeat this text:\n\n{PROMPT}"}]
        limit = "max_output_tokens" if self.kind == "response" else "max_tokens"
        prompts = {"completion": ("prompt", PROMPT), "response": ("input", turns)}
        field, prompt = prompts.get(self.kind, ("messages", turns))
        asked: dict[str, Any] = {limit: 8, "temperature": 0, field: prompt}
        asked |= self.fields
        return {name: value for name, value in asked.items() if value is not None}


CASES = (
    Case("messages", "chat"),
    Case("prompt"),
    Case("prompt (token ids)", fields={"prompt": [504, 2780, 282, 4649, 314] * 8}),
    Case("max_tokens", fields={"max_tokens": 3}),
    Case("max_completion_tokens", "chat", {"max_tokens": None, "max_completion_tokens": 3}),
    Case("temperature, seed", fields={"temperature": 0.7, "seed": 7}),
    Case("top_p", fields={"temperature": 1.0, "seed": 7, "top_p": 0.01}),
    Case("top_k", fields={"temperature": 1.0, "seed": 7, "top_k": 1}),
    Case("min_p", fields={"temperature": 1.0, "seed": 7, "min_p": 1.0}),
    Case("stop", fields={"stop": ["a"]}),
    Case("stop (absent)", fields={"stop": ["never to be seen"]}),
    Case("include_stop_str_in_output", fields={"stop": ["a"], "include_stop_str_in_output": True}),
    Case("stop_token_ids", fields={"stop_token_ids": list(range(200, 1200))}),
    Case("ignore_eos", "chat", {"ignore_eos": True, "max_tokens": 12}),
    Case("min_tokens", fields={"min_tokens": 4, "stop": ["a"]}),
    Case("presence_penalty", fields={"presence_penalty": 2.0}),
    Case("frequency_penalty", fields={"frequency_penalty": 2.0}),
    Case("repetition_penalty", fields={"repetition_penalty": 1.8}),
    Case("logit_bias", fields={"logit_bias": {"260": 100}}),
    Case("bad_words", fields={"bad_words": ["a", "the"]}),
    Case("allowed_token_ids", fields={"allowed_token_ids": [260, 261, 262, 263]}),
    Case("skip_special_tokens", "chat", {"skip_special_tokens": False, "max_tokens": 40}),
    Case("logprobs", fields={"logprobs": 3}),
    Case("logprobs, top_logprobs", "chat", {"logprobs": True, "top_logprobs": 3}),
    Case("prompt_logprobs", fields={"prompt_logprobs": 1}, streamed=False),
    Case("echo", fields={"echo": True}, grpc=False),
    Case("echo, logprobs", fields={"echo": True, "logprobs": 1}, grpc=False),
    Case(
        "echo, logprobs, max_tokens 0",
        fields={"echo": True, "logprobs": 1, "max_tokens": 0},
        grpc=False,
    ),
    Case("add_generation_prompt", "chat", {"add_generation_prompt": False}),
    Case(
        "continue_final_message",
        "chat",
        {
            "messages": [
                {"role": "user", "content": f"Repeat this text:\n\n{PROMPT}"},
                {"role": "assistant", "content": PROMPT[: len(PROMPT) // 2].rstrip()},
            ],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    Case("chat_template_kwargs", "chat", {"chat_template_kwargs": {"enable_thinking": False}}),
    Case("truncate_prompt_tokens", fields={"truncate_prompt_tokens": 100}),
    Case("truncate_prompt_tokens", "chat", {"truncate_prompt_tokens": 100}),
    Case("truncation_side", fields={"truncate_prompt_tokens": 100, "truncation_side": "right"}),
    Case("add_special_tokens", fields={"add_special_tokens": False}),
    Case("return_token_ids", fields={"return_token_ids": True}),
    Case("return_token_ids", "chat", {"return_token_ids": True}),
    Case("response_format: json_object", "chat", {"response_format": {"type": "json_object"}}),
    Case(
        "response_format: json_schema",
        "chat",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
            "max_tokens": 30,
        },
    ),
    Case("structured_outputs: regex", fields={"structured_outputs": {"regex": "[0-9]{3}-[ab]"}}),
    Case("structured_outputs: choice", fields={"structured_outputs": {"choice": ["red", "tan"]}}),
    Case(
        "structured_outputs: grammar",
        fields={"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    ),
    Case("structured_outputs: json", fields={"structured_outputs": {"json": SCHEMA}}),
    Case("messages (of a tool)", "chat", {"messages": CALLED, "tools": TOOLS}),
    Case("tools, tool_choice: auto", "chat", {"tools": TOOLS}),
    Case("tool_choice: none", "chat", {"tools": TOOLS, "tool_choice": "none"}),
    Case(
        "tool_choice: required",
        "chat",
        {"messages": IN_PARIS, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
    ),
    Case(
        "tool_choice: named",
        "chat",
        {"messages": IN_PARIS, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 60},
    ),
    Case(
        "parallel_tool_calls",
        "chat",
        {
            "messages": IN_PARIS,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 60,
        },
    ),
    Case("include_reasoning", "chat", {"include_reasoning": False, "logprobs": True}),
    Case("reasoning_effort", "chat", {"reasoning_effort": "low"}),
    Case("input (text)", "response", {"input": f"Repeat this text:\n\n{PROMPT}"}, grpc=False),
    Case("input, instructions", "response", {"instructions": "Be brief."}, grpc=False),
    Case("max_output_tokens", "response", {"max_output_tokens": 3}, grpc=False),
    Case(
        "tools, tool_choice: required",
        "response",
        {
            "input": IN_PARIS,
            "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
            "tool_choice": "required",
            "max_output_tokens": 60,
        },
        grpc=False,
    ),
    Case("messages", "message", grpc=False),
    Case("system", "message", {"system": "Be brief."}, grpc=False),
    Case("max_tokens", "message", {"max_tokens": 3}, grpc=False),
    Case("stop_sequences", "message", {"stop_sequences": ["e"]}, grpc=False),
    Case(
        "tools, tool_choice: any",
        "message",
        {
            "messages": IN_PARIS,
            "tools": [{"name": "weather", "input_schema": CITY, "strict": True}],
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
        },
        grpc=False,
    ),
    Case(
        "stream_options",
        fields={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
)
