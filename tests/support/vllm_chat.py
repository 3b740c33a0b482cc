"""vLLM's own chat serving code, without an engine: the answers that it makes of recorded tokens."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdserve.config import ModelConfig
from pdserve.models import resolve

PROMPT = list(range(3, 10))
"""Those of the scripted dispatcher."""

_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"]


def model_with_marks(folder: Path) -> Path:
    """As much of a model as parsers look at, with the tokens that mark calls and thoughts."""
    from transformers import AutoTokenizer

    source = resolve("smollm2-135m-instruct", print)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.add_tokens(_MARKS)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@dataclass(frozen=True)
class Recorded:
    """An answer: its text, in pieces of so many tokens, and how it ended."""

    text: str
    size: int = 1
    finish: str = "stop"

    def pieces(self, tokenizer: Any) -> list[tuple[str, list[int]]]:
        ids = tokenizer(self.text, add_special_tokens=False)["input_ids"]
        groups = [ids[at : at + self.size] for at in range(0, len(ids), self.size)]
        pieces = [(tokenizer.decode(group), group) for group in groups]
        assert "".join(text for text, _ in pieces) == self.text
        return pieces


class VllmServing:
    """vLLM's `OpenAIServingChat`, around the engine that it has not."""

    def __init__(self, config: ModelConfig, tokenizer: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.parser.parser_manager import ParserManager

        self.tokenizer = tokenizer
        serving: Any = object.__new__(OpenAIServingChat)
        serving.parser_cls = ParserManager.get_parser(
            config.tool_parser, config.reasoning_parser, config.tool_parser is not None
        )
        vars(serving).update(
            enable_auto_tools=config.tool_parser is not None,
            _include_reasoning_tokens_details=bool(config.reasoning_parser),
            enable_prompt_tokens_details=False,
            enable_force_include_usage=False,
            enable_log_outputs=False,
            enable_per_request_metrics=False,
            request_logger=None,
            system_fingerprint=None,
            response_role="assistant",
            chat_template=None,
            chat_template_content_format="auto",
            default_chat_template_kwargs={},
            model_config=SimpleNamespace(hf_config=None, hf_text_config=None, hf_overrides=None),
        )
        self._serving = serving

    async def answer(self, body: dict[str, Any], recorded: Recorded) -> tuple[Any, Any]:
        """The JSON of the answer, or of its chunks where it is streamed; and what vLLM's renderer
        makes of the request."""
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(body)
        serving = self._serving
        kwargs = serving._effective_chat_template_kwargs(request)
        parser = serving._make_parser(request, self.tokenizer, kwargs)
        if serving.parser_cls.reasoning_parser_cls or request.tool_choice != "none":
            request = parser.adjust_request(request)
        meta = RequestResponseMetadata(request_id="r")
        pieces = recorded.pieces(self.tokenizer)
        told = ("r", body["model"], [], self.tokenizer, meta)
        if not body.get("stream"):
            whole = ("".join(text for text, _ in pieces), [id_ for _, ids in pieces for id_ in ids])
            outputs = _outputs([whole], recorded.finish)
            done = await serving.chat_completion_full_generator(
                request, outputs, *told, parser=parser
            )
            return done.model_dump(mode="json"), request
        chunks = serving.chat_completion_stream_generator(
            request, _outputs(pieces, recorded.finish), *told, chat_template_kwargs=kwargs
        )
        lines = [line.removeprefix("data: ").strip() async for line in chunks]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]], request


async def _outputs(pieces: Sequence[tuple[str, list[int]]], finish: str) -> AsyncIterator[Any]:
    from vllm.outputs import CompletionOutput, RequestOutput

    for index, (text, ids) in enumerate(pieces):
        last = index == len(pieces) - 1
        output = CompletionOutput(0, text, ids, None, None, finish_reason=finish if last else None)
        yield RequestOutput("r", None, PROMPT, None, [output], last)


def essence(value: Any) -> Any:
    """Without what is null or one run's own: ids, times; ids of calls are told by their form."""
    if isinstance(value, list):
        return [essence(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, one in value.items():
        if one is None or name in ("created", "prompt_tokens_details"):
            continue
        if name == "id":
            kept[name] = re.sub(r"[0-9a-f-]{16,}$", "", one) if "tool" in one else ""
        else:
            kept[name] = essence(one)
    return kept
