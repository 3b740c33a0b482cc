"""Log probabilities in OpenAI's two shapes, as vLLM's own server gives them."""

from __future__ import annotations

from math import inf

from coordinator.facade.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from pdserve.sampling import TokenLogprob

EURO = TokenLogprob(5, -0.5, "€", 1)
A = TokenLogprob(6, -1.5, " a", 2)
NEVER = TokenLogprob(7, -inf, "b", 9)


def test_chats_show_the_bytes_of_each_token_and_of_as_many_as_asked() -> None:
    euro = {"token": "€", "logprob": -0.5, "bytes": [226, 130, 172]}
    a = {"token": " a", "logprob": -1.5, "bytes": [32, 97]}
    assert ChatLogprobs(0)([(EURO,)]) == {"content": [{**euro, "top_logprobs": []}]}
    assert ChatLogprobs(1)([(EURO, A)]) == {"content": [{**euro, "top_logprobs": [euro]}]}
    assert ChatLogprobs(2)([(A, EURO), (EURO, A)]) == {
        "content": [{**a, "top_logprobs": [a, euro]}, {**euro, "top_logprobs": [euro, a]}]
    }


def test_completions_count_offsets_in_characters_from_call_to_call() -> None:
    shape = CompletionLogprobs(1)
    assert shape([(EURO, A), (A, EURO)]) == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.5],
        "tokens": ["€", " a"],
        "top_logprobs": [{"€": -0.5, " a": -1.5}, {" a": -1.5, "€": -0.5}],
    }
    assert shape([(EURO,)])["text_offset"] == [3]


def test_completions_show_the_token_itself_beside_the_likeliest() -> None:
    sampled = TokenLogprob(8, -3.0, "c", 4)
    assert CompletionLogprobs(1)([(sampled, EURO)])["top_logprobs"] == [{"c": -3.0, "€": -0.5}]
    assert CompletionLogprobs(0)([(sampled,)])["top_logprobs"] == [{"c": -3.0}]


def test_the_impossible_has_a_number() -> None:
    assert CompletionLogprobs(0)([(NEVER,)])["token_logprobs"] == [-9999.0]
    assert ChatLogprobs(0)([(NEVER,)])["content"][0]["logprob"] == -9999.0


def test_those_of_a_prompt_are_by_token_id_and_lack_the_first() -> None:
    assert prompt_logprobs([(EURO, A), (NEVER,)]) == [
        None,
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "€"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": " a"},
        },
        {"7": {"logprob": -9999.0, "rank": 9, "decoded_token": "b"}},
    ]
