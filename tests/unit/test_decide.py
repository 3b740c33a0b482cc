"""The estimating decider, with seconds worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimates, HandOver, Timings
from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot, WorkerView
from pdserve.types import Mode

TIMINGS = Timings(
    step_s=0.0,
    token_s=1e-3,
    pair_s=0.0,
    sequence_s=0.01,
    context_s=0.0,
    reads_learnt=True,
    writes_learnt=True,
)
ESTIMATES = Estimates({"": TIMINGS}, HandOver(0.1, 0.0, learnt=True), answer_tokens=100)
AUTO = ModelPolicy(Mode.AUTO, decider="estimate", ttft_target_s=2.0, itl_target_s=0.1)
PROMPT = RequestFacts(1_000)
IDLE = WorkerView("p"), WorkerView("d")


def plan(
    prefill: WorkerView,
    decode: WorkerView,
    facts: RequestFacts = PROMPT,
    policy: ModelPolicy = AUTO,
    estimates: Estimates = ESTIMATES,
) -> Plan:
    pairs = {("p", "d"): ("nixl",)}
    return choose(Snapshot((prefill,), (decode,), pairs, 0, estimates), policy, facts)


def busy(tokens: int) -> WorkerView:
    """A prefill worker with so much to read."""
    return WorkerView("p", 0, tokens)


@dataclass(frozen=True)
class Row:
    """Both routes' waits in shares of 2 s, their harm, and what is taken."""

    name: str
    prefill: WorkerView
    decode: WorkerView
    facts: RequestFacts
    mode: Mode


ROWS = [
    # 1 s there, 1 + 0.1 s elsewhere: a hand-over for nothing.
    Row("all idle", *IDLE, PROMPT, Mode.COLOCATED),
    # Colocated: 1 s and a step of 0.04 s in each of four chunks: 0.58. Four answers lose 1 s each,
    # of 100 * (0.1 - 0.04) = 6 s: 0.67. Elsewhere: 1 + 0.1 + 0.04 s: 0.57.
    Row("answers would be held up", IDLE[0], WorkerView("d", 4, writing=4), PROMPT,
        Mode.DISAGGREGATED),
    # The same, but 1.3 s wait there: 1.22 shares become 1.66, against 1.25.
    Row("not at the price of a queue", busy(1_300), WorkerView("d", 4, writing=4), PROMPT,
        Mode.COLOCATED),
    # 0.6 s: 0.87 against 1.25.
    Row("a short queue is worth it", busy(600), WorkerView("d", 4, writing=4), PROMPT,
        Mode.DISAGGREGATED),
    # 10 tokens hold nobody up for long: 0.1 + ... against the hand-over.
    Row("a short prompt stays", IDLE[0], WorkerView("d", 1, writing=1), RequestFacts(10),
        Mode.COLOCATED),
    Row("so does one that is cached", IDLE[0], WorkerView("d", 4, writing=4),
        replace(PROMPT, cached_tokens={"d": 990}), Mode.COLOCATED),
    # 100 of 1,000 are left there: 0.1 s, and then the hand-over.
    Row("and one that is cached elsewhere goes there", *IDLE,
        replace(PROMPT, cached_tokens={"p": 900}), Mode.DISAGGREGATED),
    # A cache without room: 1,101 tokens are lacking, given back at 2,000 in 100 * 0.04 s.
    Row("a full cache makes both wait", IDLE[0],
        WorkerView("d", 4, writing=4, context_tokens=2_000, capacity_tokens=2_000), PROMPT,
        Mode.DISAGGREGATED),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_cheaper_route_is_taken(row: Row) -> None:
    assert plan(row.prefill, row.decode, row.facts).mode is row.mode


def test_it_says_why_in_words_and_numbers() -> None:
    assert plan(busy(600), WorkerView("d", 4, writing=4)).reason == (
        "auto: set for the model; "
        "colocated would start in 1.16 s and hold up 4 running answers by 250 ms a step, "
        "disaggregated would start in 1.74 s and hold nobody up"
    )


@pytest.mark.parametrize(
    "estimates",
    [
        replace(ESTIMATES, pools={}),
        replace(ESTIMATES, pools={"": replace(TIMINGS, writes_learnt=False)}),
        replace(ESTIMATES, hand_over=HandOver()),
    ],
    ids=["reading", "writing", "hand-overs"],
)
def test_what_is_not_learnt_leaves_it_to_the_length(estimates: Estimates) -> None:
    given = plan(*IDLE, estimates=estimates)
    assert given.mode is Mode.DISAGGREGATED
    assert given.reason == (
        "auto: set for the model; 1000 uncached prompt tokens >= 512 (estimates not learnt yet)"
    )


def test_without_a_pair_the_length_says_whether_it_fell_back() -> None:
    snapshot = Snapshot((), (WorkerView("d"),), {}, 0, ESTIMATES)
    assert choose(snapshot, AUTO, PROMPT).fell_back
    assert not choose(snapshot, AUTO, RequestFacts(100)).fell_back


@given(
    queue=st.integers(0, 20_000),
    more=st.integers(1, 20_000),
    writing=st.integers(0, 50),
    tokens=st.integers(1, 20_000),
)
def test_a_longer_queue_never_draws_a_prompt(
    queue: int, more: int, writing: int, tokens: int
) -> None:
    decode = WorkerView("d", writing, writing=writing)
    facts = RequestFacts(tokens)
    if plan(busy(queue), decode, facts).mode is Mode.COLOCATED:
        assert plan(busy(queue + more), decode, facts).mode is Mode.COLOCATED


@given(writing=st.integers(0, 200), tokens=st.integers(1, 5_000))
def test_the_queue_for_prefill_cannot_grow_for_ever(writing: int, tokens: int) -> None:
    """Whatever it would do to answers: each can be harmed once, but waiting only grows."""
    decode = WorkerView("d", writing, writing=writing)
    assert plan(busy(2_000 * (writing + 100)), decode, RequestFacts(tokens)).mode is Mode.COLOCATED
