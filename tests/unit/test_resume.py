"""What another worker is asked for when an answer was cut off: values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.policy.resume import Resumed, holds_state, resumed
from pdserve.replay import Replay
from pdserve.types import EngineRequest, SamplingParams

PROMPT = (11, 12, 13)


def asked(**sampling: Any) -> EngineRequest:
    return EngineRequest("r", PROMPT, SamplingParams(**{"max_tokens": 10, **sampling}), "salt")


def test_a_plain_answer_is_read_as_part_of_the_prompt() -> None:
    again = resumed(asked(temperature=0.0, min_tokens=4), (1, 2, 3), 9, is_whole=True)
    sampling = SamplingParams(max_tokens=7, temperature=0.0, min_tokens=1)
    assert again == Resumed(EngineRequest("r", (11, 12, 13, 1, 2, 3), sampling, "salt"), 3)


def test_what_was_owed_of_min_tokens_may_be_paid() -> None:
    again = resumed(asked(min_tokens=2), (1, 2, 3), 9, is_whole=True)
    assert again.request.sampling == SamplingParams(max_tokens=7, min_tokens=0)


def test_of_an_answer_that_has_not_begun_nothing_is_repeated() -> None:
    assert resumed(asked(seed=1), (), 0, is_whole=True) == Resumed(asked(seed=1))


@pytest.mark.parametrize(
    ("sampling", "is_whole"), [({"stop": ("x",)}, True), ({"temperature": 0.0}, False)]
)
def test_an_answer_with_state_is_replayed(sampling: dict[str, Any], is_whole: bool) -> None:
    again = resumed(asked(**sampling), (1, 2), 5, is_whole=is_whole)
    replay = Replay((1, 2), 5)
    assert again == Resumed(
        EngineRequest("r", PROMPT, asked(**sampling).sampling, "salt", replay=replay)
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "seed": 7},
        {"top_p": 0.5, "top_k": 9, "min_p": 0.1},
        {"stop_token_ids": (4,), "ignore_eos": True, "min_tokens": 3},
    ],
    ids=str,
)
def test_tokens_alone_decide(sampling: dict[str, Any]) -> None:
    assert not holds_state(SamplingParams(max_tokens=5, **sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 7},
        {"stop": ("a",)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_more_than_tokens_decides(sampling: dict[str, Any]) -> None:
    assert holds_state(SamplingParams(max_tokens=5, **sampling))
