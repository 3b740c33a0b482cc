"""Turns prompts into token ids, once for each request. Needs a tokenizer, never weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Protocol

from coordinator.template import template_kwargs, template_messages, template_tools
from coordinator.token_threads import THREAD_CHARS, in_thread
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Truncation

EVERY_TOKEN = Truncation(sys.maxsize)
"""Cuts nothing: text of any length is encoded."""


class Encoder(Protocol):
    """What the coordinator knows of a model's vocabulary.

    Both methods raise RejectedError: INVALID_ARGUMENT with `param` "messages" or "prompt",
    CONTEXT_LENGTH_EXCEEDED for text that cannot fit, which is refused before it is encoded.
    A result may still be longer than the context.
    """

    @property
    def context_length(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def encode(self, prompt: Prompt, truncation: Truncation | None = None) -> tuple[int, ...]:
        """The token ids, as the engine's own server would make them; never empty.

        With a truncation text of any length is encoded. Its number must be above 0 by then.
        """

    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """As `encode`; long prompts leave the event loop to others meanwhile."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Their text. Raises RejectedError for ids outside the vocabulary."""

    def token_strings(self, token_ids: tuple[int, ...]) -> list[str]:
        """As the vocabulary has them; not always readable."""

    def is_whole(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the text of these tokens does not end within a character."""


class PromptEncoder:
    """The tokenizer and chat template of a model folder."""

    def __init__(self, model_path: Path) -> None:
        """Raises ConfigError for a folder without a usable config.json and tokenizer."""
        # Imported late: it takes seconds, and simulated fleets do without it.
        from transformers import AutoTokenizer

        config = _read_config(model_path)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                model_path,
                local_files_only=True,
                model_max_length=sys.maxsize,  # lengths are checked, and told, elsewhere
            )
        except (OSError, ValueError, KeyError) as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"no tokenizer can be read from {model_path}: {message}") from None
        self.context_length = int(config["max_position_embeddings"])
        # The rows of the embedding, padding included: what the engine can look up.
        self.vocab_size = int(config.get("vocab_size", len(self._tokenizer)))
        longest_token = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        # No tokenizer in use here drops text, so what is longer than this cannot fit.
        self._max_bytes = self.context_length * longest_token
        # The first call settles the tokenizer's truncation state; from then on calls only
        # read it, and threads may share it.
        word = self._tokenizer("a", return_special_tokens_mask=True)
        self._added_before = word["special_tokens_mask"].index(0)

    def encode(self, prompt: Prompt, truncation: Truncation | None = None) -> tuple[int, ...]:
        match prompt:
            case ChatPrompt():
                text, param = self._render(prompt), "messages"
            case TextPrompt(text):
                param = "prompt"
            case TokenPrompt(token_ids):
                return _cut(_checked_ids(token_ids, self.vocab_size), truncation)
        self._check_length(text, param, truncation)
        ids = self._ids(text, add_special_tokens=prompt.add_special_tokens)
        added = self._added_before if prompt.add_special_tokens else 0
        return _not_empty(_cut(ids, truncation, added), param)

    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        if num_chars(prompt) < THREAD_CHARS:
            return self.encode(prompt, truncation)
        return await in_thread(self.encode, prompt, truncation)

    def is_whole(self, token_ids: tuple[int, ...]) -> bool:
        # A character has four bytes at most. One that looks like a part of another counts as one.
        tail = self._tokenizer.decode(list(token_ids[-4:]), skip_special_tokens=True)
        return not str(tail).endswith("\ufffd")

    def decode(self, token_ids: tuple[int, ...]) -> str:
        if not token_ids:
            return ""
        return str(self._tokenizer.decode(list(_checked_ids(token_ids, self.vocab_size))))

    def token_strings(self, token_ids: tuple[int, ...]) -> list[str]:
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    def _render(self, prompt: ChatPrompt) -> str:
        if self._tokenizer.chat_template is None:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                "this model has no chat template: use the completions API",
                param="messages",
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    template_messages(prompt.messages),
                    tools=template_tools(prompt.tools),
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    tokenize=False,
                    **template_kwargs(prompt),
                )
            )
        except Exception as error:  # as any program, a template may fail at its input in any way
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"the model's chat template refuses the messages: {error}",
                param="messages",
            ) from None

    def _check_length(self, text: str, param: str, truncation: Truncation | None) -> None:
        num_bytes = len(_utf8(text, param))
        if num_bytes > self._max_bytes and truncation is None:
            raise RejectedError(
                ErrorReason.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt of {num_bytes} bytes cannot fit the model's context of "
                f"{self.context_length} tokens",
                param=param,
            )

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


class ByteEncoder:
    """Stands in for a tokenizer where there is no model folder: one token for each byte."""

    _FIRST_BYTE_ID = 3
    vocab_size = _FIRST_BYTE_ID + 256

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length

    def encode(self, prompt: Prompt, truncation: Truncation | None = None) -> tuple[int, ...]:
        match prompt:
            case ChatPrompt():
                ids = self._byte_ids(_plain_text(prompt), "messages")
            case TextPrompt(text):
                ids = self._byte_ids(text, "prompt")
            case TokenPrompt(token_ids):
                ids = _checked_ids(token_ids, self.vocab_size)
        return _cut(ids, truncation)

    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        return self.encode(prompt, truncation)

    def is_whole(self, token_ids: tuple[int, ...]) -> bool:
        return True

    def decode(self, token_ids: tuple[int, ...]) -> str:
        ids = _checked_ids(token_ids, self.vocab_size) if token_ids else ()
        data = bytes(id_ - self._FIRST_BYTE_ID for id_ in ids if id_ >= self._FIRST_BYTE_ID)
        return data.decode(errors="replace")

    def token_strings(self, token_ids: tuple[int, ...]) -> list[str]:
        return [self.decode((token_id,)) for token_id in token_ids]

    def _byte_ids(self, text: str, param: str) -> tuple[int, ...]:
        data = _utf8(text, param)
        return _not_empty(tuple(byte + self._FIRST_BYTE_ID for byte in data), param)


def _read_config(model_path: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_path / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"model folder {model_path}: config.json: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"model folder {model_path}: config.json is not JSON") from None
    text_config = config.get("text_config", config) if isinstance(config, dict) else {}
    if not isinstance(text_config.get("max_position_embeddings"), int):
        raise ConfigError(f"model folder {model_path}: config.json: no max_position_embeddings")
    return dict(text_config)


def num_chars(prompt: Prompt) -> int:
    """Characters to be encoded; token ids need no encoding."""
    match prompt:
        case ChatPrompt():
            return len(_plain_text(prompt))
        case TextPrompt(text):
            return len(text)
        case TokenPrompt():
            return 0


def _plain_text(prompt: ChatPrompt) -> str:
    """All that is said in a conversation, in no model's own format."""
    lines = [f"tool {tool.name}: {tool.description}: {tool.parameters}\n" for tool in prompt.tools]
    for message in prompt.messages:
        calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
        lines.append(f"{message.role}: {message.content}{calls}\n")
    text = "".join(lines)
    if prompt.continue_final_message:
        return text.removesuffix("\n")
    return f"{text}assistant:" if prompt.add_generation_prompt else text


def _cut(ids: tuple[int, ...], truncation: Truncation | None, added: int = 0) -> tuple[int, ...]:
    """`added` tokens at the beginning are the tokenizer's own."""
    if truncation is None or len(ids) <= truncation.tokens:
        return ids
    if truncation.side == "right":
        return ids[: truncation.tokens]
    kept = min(added, truncation.tokens) if truncation.side is None else 0
    return ids[:kept] + ids[len(ids) - truncation.tokens + kept :]


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RejectedError(
            ErrorReason.INVALID_ARGUMENT, "the text has lone surrogates", param=param
        ) from None


def _not_empty(ids: tuple[int, ...], param: str) -> tuple[int, ...]:
    if not ids:
        raise RejectedError(ErrorReason.INVALID_ARGUMENT, "the prompt is empty", param=param)
    return ids


def _checked_ids(ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"token id {token_id} is outside the vocabulary of {vocab_size}",
                param="prompt",
            )
    return _not_empty(ids, "prompt")
