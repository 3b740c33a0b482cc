"""How two answers compare in the conformance table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance.seen import Seen, Verdict, calls_of, near_tie, of_chosen, verdict

ONE = Seen("abc def", "length", (5, 2), (-0.5, -1.0), 0, "colocated")


@pytest.mark.parametrize(
    ("seen", "near_tie_at", "expected"),
    [
        (ONE, None, Verdict.EQUAL),
        (replace(ONE, logprobs=(-0.6, -0.9)), None, Verdict.EQUAL),
        (replace(ONE, logprobs=(-0.7, -1.0)), None, Verdict.DIFFERENT),
        (replace(ONE, logprobs=(-0.5,)), None, Verdict.DIFFERENT),
        (replace(ONE, usage=(5, 3)), None, Verdict.DIFFERENT),
        (replace(ONE, finish_reason="stop"), None, Verdict.DIFFERENT),
        (replace(ONE, num_prompt_logprobs=4), None, Verdict.DIFFERENT),
        (replace(ONE, calls=(("f", "{}"),)), None, Verdict.DIFFERENT),
        (replace(ONE, mode="disaggregated"), None, Verdict.COLOCATED),
        (replace(ONE, text="abc xyz"), None, Verdict.DIFFERENT),
        (replace(ONE, text="abc xyz"), 4, Verdict.NEAR_TIE),
        (replace(ONE, text="xyz def"), 4, Verdict.DIFFERENT),
        (Seen(refused="n"), None, Verdict.REFUSED),
    ],
)
def test_verdict(seen: Seen, near_tie_at: int | None, expected: Verdict) -> None:
    assert verdict(ONE, seen, "colocated", near_tie_at) == expected


def test_a_near_tie_is_where_the_two_best_are_close() -> None:
    tops = [{"ab": -0.1, "c": -3.0}, {"d": -1.0, "e": -1.1}]
    assert near_tie(tops, ["ab", "d"]) == 2
    assert near_tie(tops[:1], ["ab"]) is None
    assert near_tie([{"ab": -0.1}], ["ab"]) is None


def test_the_pieces_of_a_choice_make_one_answer() -> None:
    pieces = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {
            "delta": {"content": "a"},
            "logprobs": {"content": [{"logprob": -0.5}]},
            "finish_reason": None,
        },
        {
            "delta": {"content": "b"},
            "logprobs": {"content": [{"logprob": -1.0}]},
            "finish_reason": "stop",
        },
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    assert of_chosen(pieces, usage, ("colocated", "why")) == Seen(
        "ab", "stop", (3, 2), (-0.5, -1.0), 0, "colocated", None, "why"
    )


def test_calls_are_the_same_however_they_came() -> None:
    pieces = [
        (0, {"name": "f", "arguments": None}),
        (0, {"arguments": '{"x":'}),
        (1, {"name": "g", "arguments": "{"}),
        (0, {"arguments": " 1}"}),
    ]
    assert calls_of(pieces) == (("f", '{"x": 1}'), ("g", "{"))
    assert calls_of([(0, {"name": "f", "arguments": '{"x":1}'})]) == (("f", '{"x": 1}'),)
