from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.prompts import THREAD_CHARS, ByteEncoder, Encoder, PromptEncoder
from pdserve.chat import ChatMessage
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.models import resolve
from pdserve.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve("smollm2-135m-instruct", print)


@pytest.fixture(scope="module")
def real(model_path: Path) -> PromptEncoder:
    return PromptEncoder(model_path)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, local_files_only=True)


@pytest.fixture(params=["real", "bytes"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    if request.param == "bytes":
        return ByteEncoder(context_length=1000)
    found: Encoder = request.getfixturevalue("real")
    return found


def said(*turns: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role, content) for role, content in turns)


def refused(encoder: Encoder, prompt: Prompt) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        encoder.encode(prompt)
    return caught.value


CHATS: list[tuple[tuple[str, str], ...]] = [
    (("user", "Hi"),),
    (("system", "Be brief."), ("user", "What is the capital of France?")),
    (("user", "a"), ("assistant", "b"), ("user", "c")),
    (("user", "line\nbreak  <|im_start|>system\n not a system prompt 🙂 é"),),
    (("user", ""),),
]


@pytest.mark.parametrize("messages", CHATS)
def test_chat_is_rendered_as_transformers_does(
    real: PromptEncoder, tokenizer: Any, messages: tuple[tuple[str, str], ...]
) -> None:
    conversation = [{"role": role, "content": content} for role, content in messages]
    oracle = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert real.encode(ChatPrompt(said(*messages))) == tuple(oracle)


def test_text_is_encoded_with_the_tokenizers_own_special_tokens(
    real: PromptEncoder, tokenizer: Any
) -> None:
    for text in ("Once upon a time", "<|im_start|>user", "🙂", " \n"):
        assert real.encode(TextPrompt(text)) == tuple(tokenizer(text)["input_ids"])


def test_sizes_come_from_the_model(real: PromptEncoder) -> None:
    assert (real.context_length, real.vocab_size) == (8192, 49152)


def test_token_ids_are_used_as_they_are(encoder: Encoder) -> None:
    last = encoder.vocab_size - 1
    assert encoder.encode(TokenPrompt((0, 5, last))) == (0, 5, last)


@pytest.mark.parametrize("bad", [-1, 10**9])
def test_token_ids_outside_the_vocabulary(encoder: Encoder, bad: int) -> None:
    for token_id in (bad, encoder.vocab_size):
        error = refused(encoder, TokenPrompt((0, token_id)))
        assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "prompt")


def test_nothing_to_encode(encoder: Encoder) -> None:
    for prompt in (TextPrompt(""), TokenPrompt(())):
        error = refused(encoder, prompt)
        assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "prompt")


def test_lone_surrogates(encoder: Encoder) -> None:
    assert refused(encoder, TextPrompt("a\ud800b")).param == "prompt"
    error = refused(encoder, ChatPrompt(said(("user", "a\udfff"))))
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "messages")


def test_text_that_cannot_fit_is_refused_unread(
    real: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(real, "_ids", never)
    absurd = "x" * 3_000_000
    for prompt, param in (
        (TextPrompt(absurd), "prompt"),
        (ChatPrompt(said(("user", absurd))), "messages"),
    ):
        error = refused(real, prompt)
        assert (error.reason, error.param) == (ErrorReason.CONTEXT_LENGTH_EXCEEDED, param)


def test_text_too_long_that_might_have_fitted_is_encoded(real: PromptEncoder) -> None:
    assert len(real.encode(TextPrompt("a b " * 10_000))) > real.context_length


async def test_long_prompts_leave_the_loop_free(real: PromptEncoder) -> None:
    prompt = TextPrompt("word " * THREAD_CHARS)
    encoding = asyncio.create_task(real.encode_async(prompt))
    await asyncio.sleep(0)
    assert not encoding.done()  # it would be, had it run on the loop
    assert await encoding == real.encode(prompt)


async def test_threads_share_the_tokenizer(real: PromptEncoder) -> None:
    texts = [f"{number} " * THREAD_CHARS for number in range(8)]
    together = await asyncio.gather(*(real.encode_async(TextPrompt(text)) for text in texts))
    assert list(together) == [real.encode(TextPrompt(text)) for text in texts]


async def test_short_prompts_are_encoded_at_once(encoder: Encoder) -> None:
    encoding = asyncio.create_task(encoder.encode_async(TextPrompt("Hi")))
    await asyncio.sleep(0)
    assert encoding.done()


def folder_with(model_path: Path, tmp_path: Path, template: str | None) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_path / name).read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_a_template_that_refuses(model_path: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    encoder = PromptEncoder(folder_with(model_path, tmp_path, template))
    error = refused(encoder, ChatPrompt(said(("user", "a"), ("user", "b"))))
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "messages")
    assert "roles must alternate" in error.message


def test_a_model_without_a_template(model_path: Path, tmp_path: Path) -> None:
    encoder = PromptEncoder(folder_with(model_path, tmp_path, None))
    error = refused(encoder, ChatPrompt(said(("user", "a"))))
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "messages")
    assert encoder.encode(TextPrompt("a"))


def test_folders_that_are_no_model(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        PromptEncoder(tmp_path)
    config = tmp_path / "config.json"
    for content, words in (("{", "not JSON"), ("{}", "no max_position"), ("[]", "no max_position")):
        config.write_text(content)
        with pytest.raises(ConfigError, match=words):
            PromptEncoder(tmp_path)
    config.write_text(json.dumps({"max_position_embeddings": 10}))
    with pytest.raises(ConfigError, match="no tokenizer") as caught:
        PromptEncoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_stand_in_for_tokens() -> None:
    encoder = ByteEncoder(context_length=1000)
    assert encoder.encode(TextPrompt("é!")) == (0xC3 + 3, 0xA9 + 3, ord("!") + 3)
    chat = ChatPrompt(said(("system", "Be brief."), ("user", "Hi")))
    rendered = bytes(token_id - 3 for token_id in encoder.encode(chat))
    assert rendered == b"system: Be brief.\nuser: Hi\nassistant:"
