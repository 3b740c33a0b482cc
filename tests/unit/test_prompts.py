from __future__ import annotations

import asyncio
import json
import threading
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from coordinator.facade.validate import RESERVED_KWARGS
from coordinator.prompts import ByteEncoder, Encoder, PromptEncoder
from coordinator.token_threads import THREAD_CHARS, THREADS
from pdserve.chat import ChatMessage
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.models import resolve
from pdserve.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Truncation


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


@pytest.mark.parametrize(
    "asked",
    [
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_the_assistants_turn_is_opened_left_out_or_gone_on_with(
    real: PromptEncoder, tokenizer: Any, asked: dict[str, bool]
) -> None:
    messages = (("user", "Count."), ("assistant", "one, two,"))
    conversation = [{"role": role, "content": content} for role, content in messages]
    oracle = tokenizer.apply_chat_template(conversation, return_dict=False, **asked)
    prompt = ChatPrompt(said(*messages), **asked)  # type: ignore[arg-type]
    assert real.encode(prompt) == tuple(oracle)
    assert real.decode(real.encode(prompt)).endswith(
        "one, two," if len(asked) == 2 else "one, two,<|im_end|>\n"
    )


def test_a_template_gets_the_values_for_its_variables(model_path: Path, tmp_path: Path) -> None:
    template = "{% if think %}think {{ depth + 1 }}: {% endif %}{{ messages[0].content }}"
    encoder = PromptEncoder(folder_with(model_path, tmp_path, template))
    chat = said(("user", "Hi"))
    for kwargs, text in (
        ({}, "Hi"),
        ({"think": True, "depth": 2, "unknown": [1]}, "think 3: Hi"),
    ):
        prompt = ChatPrompt(chat, template_kwargs=kwargs)
        assert encoder.decode(encoder.encode(prompt)) == text
    error = refused(encoder, ChatPrompt(chat, template_kwargs={"think": True, "depth": "a"}))
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, "messages")


def test_no_value_of_a_clients_can_stand_for_what_renders_a_template(tokenizer: Any) -> None:
    given = signature(type(tokenizer).apply_chat_template).parameters
    # Documents are the template's own, as any other variable.
    assert set(given) - {"kwargs", "documents"} <= RESERVED_KWARGS
    assert tokenizer.special_tokens_map.keys() <= RESERVED_KWARGS


def test_prompts_are_cut_to_the_tokens_that_are_to_be_kept(encoder: Encoder) -> None:
    text = TextPrompt("Once upon a time there was a fox")
    ids = encoder.encode(text)
    chat = ChatPrompt(said(("user", "Once")))
    of_chat = encoder.encode(chat)
    for prompt, all_ids in ((text, ids), (TokenPrompt(ids), ids), (chat, of_chat)):
        assert encoder.encode(prompt, Truncation(3)) == all_ids[-3:]
        assert encoder.encode(prompt, Truncation(3, "left")) == all_ids[-3:]
        assert encoder.encode(prompt, Truncation(3, "right")) == all_ids[:3]
        assert encoder.encode(prompt, Truncation(len(all_ids))) == all_ids
    # Whatever is to be left of it, a text may be long.
    assert len(encoder.encode(TextPrompt("x" * 3_000_000), Truncation(5))) == 5


def test_special_tokens_are_the_tokenizers_to_add_and_not_the_first_to_go(
    model_path: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    folder = folder_with(model_path, tmp_path, None)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    backend.save(str(folder / "tokenizer.json"))
    encoder = PromptEncoder(folder)
    text = "Once upon a time"
    whole = encoder.encode(TextPrompt(text))
    bare = encoder.encode(TextPrompt(text, add_special_tokens=False))
    assert whole == (1, *bare, 2)
    oracle = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    for tokens in (3, 4):
        kept = tuple(oracle(text, truncation=True, max_length=tokens)["input_ids"])
        assert encoder.encode(TextPrompt(text), Truncation(tokens)) == kept
    assert encoder.encode(TextPrompt(text), Truncation(3, "left")) == whole[-3:]
    assert encoder.encode(TextPrompt(text), Truncation(3, "right")) == whole[:3]


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


async def test_long_texts_share_a_few_threads(
    real: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    together = threading.Barrier(THREADS)

    def note(text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        together.wait()  # until as many are at work as there may be
        threads.add(threading.current_thread())
        return (1,)

    monkeypatch.setattr(real, "_ids", note)
    prompt = TextPrompt("a" * THREAD_CHARS)
    await asyncio.gather(*(real.encode_async(prompt) for _ in range(3 * THREADS)))
    assert len(threads) == THREADS


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
    hi = said(("user", "Hi"))
    goes_on = ChatPrompt(hi, add_generation_prompt=False, continue_final_message=True)
    assert encoder.decode(encoder.encode(goes_on)) == "user: Hi"
    assert (
        encoder.decode(encoder.encode(ChatPrompt(hi, add_generation_prompt=False))) == "user: Hi\n"
    )
