"""Several choices of one request are requests of their own."""

from __future__ import annotations

import time

from coordinator.facade.several import parts_of
from coordinator.record import RequestRecord
from pdserve.types import GenerateSpec, SamplingParams, TextPrompt


def test_what_is_learnt_of_one_choice_is_not_told_of_another() -> None:
    prompt = TextPrompt("hello")
    spec = GenerateSpec("r", "tiny", prompt, SamplingParams(max_tokens=1))
    record = RequestRecord("r", "http", "chat", False, "trace", time.monotonic())
    records = [part.record for part in parts_of(spec, record, [prompt], 3)]
    assert [it.request_id for it in records] == ["r", "r-1", "r-2"]
    for number, it in enumerate(records):
        it.phase("queue")
        it.fallbacks.append(f"fell {number}")
        it.recoveries.append(f"cut off {number}")
    assert len({it.phases["queue"] for it in records}) == 3
    assert [it.fallbacks for it in records] == [["fell 0"], ["fell 1"], ["fell 2"]]
    assert [it.recoveries for it in records] == [["cut off 0"], ["cut off 1"], ["cut off 2"]]
