"""A client cannot tell the route by the answer: byte-equal text, whichever way it went."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from uuid import uuid4

import pytest
from transformers import AutoTokenizer

from pdserve import models
from pdserve.types import LeaseEnd
from pdserve.v1 import generation_pb2 as generation
from pdserve.v1 import inference_pb2 as inference
from tests.support.fleet import MODES, TIMEOUT_S, Fleet, Prompt, until
from tests.support.prompts import prompts
from tests.support.second_coordinator import second_coordinator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""SmolLM2-135M: layers, K and V, KV heads, head size, bytes of a bfloat16."""
BLOCK, CHUNK = 32, 256
"""Tokens; what the fleet's workers are started with."""


@pytest.fixture(scope="module")
def grpc_fleet(fleet: Fleet) -> Iterator[Fleet]:
    """The same workers, KV between them over gRPC; without it, it goes over NIXL."""
    with second_coordinator(fleet, "grpc") as clients:
        yield clients


def moved(fleet: Fleet) -> dict[str, float]:
    """Bytes that the decode worker has fetched so far, by transport."""
    name = "pdserve_kv_transfer_bytes_total"
    return {
        transport: fleet.metric("decode-0", name, transport=transport)
        for transport in ("nixl", "grpc")
    }


def leases(fleet: Fleet) -> dict[str, float]:
    """Leases that have ended so far, by how."""
    name = "pdserve_kv_leases_total"
    return {end: fleet.metric("prefill-0", name, end=end) for end in LeaseEnd}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {transport: after[transport] - before[transport] for transport in before}


@pytest.mark.parametrize("prompt", prompts(), ids=lambda each: f"{len(each.text)}-{each.kind}")
def test_every_way_gives_the_same_text_and_the_hand_off_is_real(
    fleet: Fleet, grpc_fleet: Fleet, prompt: Prompt
) -> None:
    texts: dict[tuple[object, ...], str] = {}
    ended, handed_over = leases(fleet), 0
    ways = [
        *((fleet, "nixl", *way) for way in product(MODES, ("http", "grpc"), (False, True))),
        (grpc_fleet, "grpc", "disaggregated", "http", True),
        (grpc_fleet, "grpc", "disaggregated", "grpc", False),
    ]
    for clients, transport, mode, surface, stream in ways:
        before = moved(fleet)
        answer = clients.ask(prompt, mode, surface, stream)  # type: ignore[arg-type]  # product forgets the literals
        came = difference(before, moved(fleet))
        handed_over += mode == "disaggregated"
        texts[transport, mode, surface, stream] = answer.text
        assert answer.mode == mode
        if mode == "disaggregated":
            # The decode side reads the last prompt token itself, to sample from it.
            assert came.pop(transport) >= (answer.prompt_tokens - 1) * KV_BYTES_PER_TOKEN
        assert not any(came.values())
    assert len(set(texts.values())) == 1, texts
    # Probes of pairs that have just met may be among them.
    until(lambda: leases(fleet)["fetched"] >= ended["fetched"] + handed_over)
    assert leases(fleet) | {"fetched": 0} == ended | {"fetched": 0}
    assert texts.popitem()[1]


def test_a_crowd_gets_the_answers_of_those_who_come_alone(fleet: Fleet, grpc_fleet: Fleet) -> None:
    """No near tie is among these prompts (`prompts`), so what batching does to logits shows in
    no text."""
    shortest = sorted(prompts(), key=lambda prompt: len(prompt.text))[:16]
    alone = [fleet.ask(prompt, "colocated", "http", False).text for prompt in shortest]
    before = moved(fleet)
    with ThreadPoolExecutor(2 * len(shortest)) as crowd:
        asked = [
            crowd.submit(clients.ask, prompt, "disaggregated", surface, True)
            for prompt in shortest
            for clients, surface in ((fleet, "http"), (grpc_fleet, "grpc"))
        ]
        answers = [each.result() for each in asked]
    assert all(answer.mode == "disaggregated" for answer in answers)
    assert [answer.text for answer in answers] == [text for text in alone for _ in range(2)]
    came = difference(before, moved(fleet))
    least = sum(answer.prompt_tokens - 1 for answer in answers[::2]) * KV_BYTES_PER_TOKEN
    assert min(came.values()) >= least


def test_the_prompts_span_what_they_should(fleet: Fleet) -> None:
    by_length = sorted(prompts(), key=lambda prompt: len(prompt.text))
    shortest, longest = (
        fleet.ask(Prompt(each.kind, each.text, max_tokens=1), "colocated", "http", False)
        for each in (by_length[0], by_length[-1])
    )
    assert len(by_length) == 20
    assert shortest.prompt_tokens <= 12
    assert 2700 <= longest.prompt_tokens <= 3200


# Prompts by their exact length.


@pytest.fixture(scope="module")
def counting() -> list[int]:
    """The tokens of a count, whose next number is never in doubt."""
    tokenizer = AutoTokenizer.from_pretrained(models.resolve(models.DEFAULT_MODEL, print))
    ids: list[int] = tokenizer(", ".join(map(str, range(100, 300))) + ",").input_ids
    return ids


def generate(
    clients: Fleet, token_ids: list[int], mode: str, salt: str
) -> inference.GenerateResponse:
    return clients.grpc.Generate(
        inference.GenerateRequest(
            model=clients.model,
            token_ids=generation.TokenIds(ids=token_ids),
            sampling=generation.SamplingParams(max_tokens=6, temperature=0),
            options=inference.RequestOptions(mode=MODES[mode], cache_salt=salt),  # type: ignore[arg-type]
        ),
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@pytest.mark.parametrize(
    "length", [edge + beside for edge in (BLOCK, CHUNK, 2 * CHUNK) for beside in (-1, 0, 1)]
)
def test_prompts_around_the_edges_of_blocks_and_chunks(
    fleet: Fleet, grpc_fleet: Fleet, counting: list[int], length: int, transport: str
) -> None:
    clients = fleet if transport == "nixl" else grpc_fleet
    token_ids = counting[-length:]
    alone = generate(fleet, token_ids, "colocated", "colocated")
    before = moved(fleet)
    handed_over = generate(clients, token_ids, "disaggregated", uuid4().hex)
    came = difference(before, moved(fleet))
    assert handed_over.text == alone.text
    assert handed_over.usage.prompt_tokens == length
    blocks = -(-length // BLOCK)
    assert came.pop(transport) == blocks * BLOCK * KV_BYTES_PER_TOKEN
    assert not any(came.values())


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_what_the_decode_side_has_cached_is_not_fetched(
    fleet: Fleet, grpc_fleet: Fleet, counting: list[int], transport: str
) -> None:
    clients = fleet if transport == "nixl" else grpc_fleet
    salt = uuid4().hex
    prefix, whole = counting[:300], counting[:500]
    generate(fleet, prefix, "colocated", salt)
    before = moved(fleet)
    handed_over = generate(clients, whole, "disaggregated", salt)
    came = difference(before, moved(fleet))
    # 300 tokens are 9 whole blocks, 500 are 16 in all.
    assert came.pop(transport) == (16 - 9) * BLOCK * KV_BYTES_PER_TOKEN
    assert handed_over.text == generate(fleet, whole, "colocated", uuid4().hex).text


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_what_the_prefill_side_has_cached_is_given_out_like_the_rest(
    fleet: Fleet, grpc_fleet: Fleet, counting: list[int], transport: str
) -> None:
    clients = fleet if transport == "nixl" else grpc_fleet
    salt = uuid4().hex
    prefix, whole = counting[:300], counting[:500]
    generate(clients, prefix, "disaggregated", salt)
    handed_over = generate(clients, whole, "disaggregated", salt)
    assert handed_over.usage.cached_tokens == 9 * BLOCK
    assert handed_over.text == generate(fleet, whole, "colocated", uuid4().hex).text
