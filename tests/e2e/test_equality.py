"""A client cannot tell the route by the answer: byte-equal text, whichever way it went."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.fleet import Fleet, Prompt
from tests.support.prompts import prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""SmolLM2-135M: layers, K and V, KV heads, head size, bytes of a bfloat16."""


@pytest.mark.parametrize("prompt", prompts(), ids=lambda each: f"{len(each.text)}-{each.kind}")
def test_every_way_gives_the_same_text_and_the_hand_off_is_real(
    fleet: Fleet, prompt: Prompt
) -> None:
    texts: dict[tuple[object, ...], str] = {}
    for way in product(("colocated", "disaggregated"), ("http", "grpc"), (False, True)):
        before = fleet.metric("decode-0", "pdserve_kv_transfer_bytes_total", transport="nixl")
        answer = fleet.ask(prompt, *way)  # type: ignore[arg-type]  # product forgets the literals
        after = fleet.metric("decode-0", "pdserve_kv_transfer_bytes_total", transport="nixl")
        texts[way] = answer.text
        assert answer.mode == way[0]
        if way[0] == "colocated":
            assert after == before
        else:
            # The decode side reads the last prompt token itself, to sample from it.
            assert after - before >= (answer.prompt_tokens - 1) * KV_BYTES_PER_TOKEN
    assert len(set(texts.values())) == 1, texts
    assert texts.popitem()[1]


def test_the_prompts_span_what_they_should(fleet: Fleet) -> None:
    by_length = sorted(prompts(), key=lambda prompt: len(prompt.text))
    shortest, longest = (
        fleet.ask(Prompt(each.kind, each.text, max_tokens=1), "colocated", "http", False)
        for each in (by_length[0], by_length[-1])
    )
    assert len(by_length) == 20
    assert shortest.prompt_tokens <= 12
    assert 2700 <= longest.prompt_tokens <= 3200
