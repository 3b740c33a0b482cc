"""The exact bytes of the event streams."""

from __future__ import annotations

import pytest

from coordinator.facade.logprobs import CompletionLogprobs
from coordinator.facade.sse import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    AnswerIdentity,
    Frames,
    Shown,
)
from pdserve.errors import ErrorReason, PdserveError
from pdserve.sampling import TokenLogprob
from pdserve.types import Delta, FinishReason, Usage

IDENTITY = AnswerIdentity("chatcmpl-1", 1700000000, 'm"x')
HEAD = b'"created":1700000000,"model":"m\\"x","choices":'
CHAT_HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",' + HEAD
TEXT_HEAD = b'data: {"id":"chatcmpl-1","object":"text_completion",' + HEAD
DONE = b"data: [DONE]\n\n"
PROMPT = tuple(range(7))


def last(text: str, reason: FinishReason, usage: Usage) -> Delta:
    return Delta(text, finish_reason=reason, usage=usage)


def closing(frames: Frames, delta: Delta) -> bytes:
    assert delta.usage is not None
    return frames.last(delta) + frames.end(delta.usage)


def test_chat_without_usage() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(), PROMPT)
    assert frames.opening == (
        CHAT_HEAD + b'[{"index":0,"delta":{"role":"assistant","content":""},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert frames.delta('a"\n🙂') == (
        CHAT_HEAD
        + '[{"index":0,"delta":{"content":"a\\"\\n🙂"},'
        '"logprobs":null,"finish_reason":null}]}\n\n'.encode()
    )
    assert closing(frames, last("end", FinishReason.LENGTH, Usage(7, 2, 3))) == (
        CHAT_HEAD + b'[{"index":0,"delta":{"content":"end"},'
        b'"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n' + DONE
    )


def test_chat_with_usage() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(include_usage=True), PROMPT)
    assert frames.opening.endswith(b'"finish_reason":null}],"usage":null}\n\n')
    assert frames.delta("a").endswith(b'"finish_reason":null}],"usage":null}\n\n')
    assert closing(frames, last("", FinishReason.STOP, Usage(7, 2, 3))) == (
        CHAT_HEAD + b'[{"index":0,"delta":{"content":""},'
        b'"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n'
        + CHAT_HEAD
        + b'[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,'
        b'"prompt_tokens_details":{"cached_tokens":3}}}\n\n' + DONE
    )


def test_completion() -> None:
    frames = Frames(IDENTITY, COMPLETION_CHUNK, Shown(), PROMPT)
    assert frames.opening == b""
    assert frames.delta("a") == (
        TEXT_HEAD + b'[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert closing(frames, last("b", FinishReason.STOP, Usage(1, 1))) == (
        TEXT_HEAD
        + b'[{"index":0,"text":"b","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        + DONE
    )


@pytest.mark.parametrize("text", ["\r\n\r\ndata: [DONE]\n\n", "\u2028\u0000\x7f"])
def test_no_text_can_break_out_of_its_event(text: str) -> None:
    event = Frames(IDENTITY, CHAT_CHUNK, Shown(), PROMPT).delta(text)
    assert event.count(b"\n") == 2
    assert event.endswith(b"\n\n")
    assert b"\r" not in event


def test_a_stream_that_breaks_has_no_other_end() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(), PROMPT)
    assert frames.broken(PdserveError(ErrorReason.DECODE_FAILED, "x\ny")) == (
        b'data: {"error":{"message":"x\\ny","type":"server_error","param":null,'
        b'"code":"decode_failed"}}\n\n'
    )


def test_with_logprobs_a_piece_shows_those_of_its_tokens() -> None:
    frames = Frames(IDENTITY, COMPLETION_CHUNK, Shown(logprobs=CompletionLogprobs(0)), PROMPT)
    assert not frames.is_plain
    a, b = (TokenLogprob(5, -0.5, " a", 1),), (TokenLogprob(6, -1.0, "b", 2),)
    shown = (
        b',"logprobs":{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}'
    )
    assert frames.piece(Delta("", [5], logprobs=[a])) == (
        TEXT_HEAD
        + b'[{"index":0,"text":""'
        + shown % (b"0", b"-0.5", b'" a"', b'{" a":-0.5}')
        + b',"finish_reason":null}]}\n\n'
    )
    end = Delta(" ab", [6], FinishReason.STOP, Usage(1, 2), logprobs=[b])
    assert closing(frames, end) == (
        TEXT_HEAD
        + b'[{"index":0,"text":" ab"'
        + shown % (b"2", b"-1.0", b'"b"', b'{"b":-1.0}')
        + b',"finish_reason":"stop","stop_reason":null}]}\n\n'
        + DONE
    )


def test_usage_so_far_is_told_with_each_event_where_asked_for() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(True, continuous_usage=True), PROMPT)
    assert not frames.is_plain
    so_far = b',"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}}\n\n'
    assert frames.opening.endswith(so_far % (0, 7))
    assert frames.piece(Delta("", [5])) == b""
    assert frames.piece(Delta("a", [6])).endswith(so_far % (2, 9))
    last_choice, *_ = closing(frames, last("b", FinishReason.STOP, Usage(7, 3))).split(b"data: ")[
        1:
    ]
    assert last_choice.endswith(so_far % (3, 10))


def test_the_last_event_tells_what_stopped_the_answer() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(), PROMPT)
    for met, shown in (("EN\n", b'"EN\\n"'), (7, b"7")):
        delta = Delta("", finish_reason=FinishReason.STOP, usage=Usage(1, 1), stop_reason=met)
        assert b'"finish_reason":"stop","stop_reason":' + shown in closing(frames, delta)


def test_a_piece_of_nothing_is_no_event() -> None:
    assert Frames(IDENTITY, CHAT_CHUNK, Shown(), PROMPT).piece(Delta("", [5])) == b""


IDS = b"[0,1,2,3,4,5,6]"


def test_token_ids_are_told_with_each_event_and_those_of_the_prompt_once() -> None:
    frames = Frames(IDENTITY, CHAT_CHUNK, Shown(token_ids=True), PROMPT)
    assert not frames.is_plain
    assert frames.opening.endswith(b'"finish_reason":null}],"prompt_token_ids":' + IDS + b"}\n\n")
    assert frames.piece(Delta("", [5])).endswith(b'"finish_reason":null,"token_ids":[5]}]}\n\n')
    assert frames.piece(Delta("")) == b""
    end = Delta("b", [6, 7], FinishReason.STOP, Usage(7, 3))
    assert frames.last(end).endswith(b'"stop_reason":null,"token_ids":[6,7]}]}\n\n')


def test_a_completions_first_event_tells_the_tokens_of_its_prompt() -> None:
    frames = Frames(IDENTITY, COMPLETION_CHUNK, Shown(token_ids=True), PROMPT)
    of_prompt = b'"finish_reason":null,"prompt_token_ids":' + IDS
    assert frames.piece(Delta("a", [5])).endswith(of_prompt + b',"token_ids":[5]}]}\n\n')
    assert frames.piece(Delta("b", [6])).endswith(b'"finish_reason":null,"token_ids":[6]}]}\n\n')
