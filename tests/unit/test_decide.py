"""The estimating decider, with seconds worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimates, HandOver, Timings
from coordinator.policy.forecast import Forecast
from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot, WorkerView
from pdserve.types import Mode, Role

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
PAIRS = {("p", "d"): ("nixl",)}


def plan(
    prefill: WorkerView,
    decode: WorkerView,
    facts: RequestFacts = PROMPT,
    policy: ModelPolicy = AUTO,
    estimates: Estimates = ESTIMATES,
) -> Plan:
    return choose(Snapshot((prefill,), (decode,), PAIRS, 0, estimates), policy, facts)


def busy(tokens: int) -> WorkerView:
    """A prefill worker with so much to read."""
    return WorkerView("p", 0, tokens)


@dataclass(frozen=True)
class Row:
    """Both routes' waits in shares of 2 s, to the power of four, and their harm, in shares of
    0.1 s a token, to the power of sixteen; what is taken.

    What the answer itself costs on the decode worker is the same on both routes.
    """

    name: str
    prefill: WorkerView
    decode: WorkerView
    facts: RequestFacts
    mode: Mode


SEVEN = WorkerView("d", 7, writing=7)
TWO = WorkerView("d", 2, writing=2)
ONE = WorkerView("d", 1, writing=1)
ROWS = [
    # 1 s there, 1 + 0.1 s elsewhere: a hand-over for nothing.
    Row("all idle", *IDLE, PROMPT, Mode.COLOCATED),
    # Colocated: 1 s and a step of 0.07 s in each of four chunks: 0.64^4 = 0.17. Seven answers, at
    # 0.07 of 0.1 s a token, take 1 s / 100 tokens more each: 7 * (0.8^16 - 0.7^16) = 0.17.
    # Elsewhere: 1 + 0.1 + 0.07 s: 0.585^4 = 0.12.
    Row("answers would be held up", IDLE[0], SEVEN, PROMPT, Mode.DISAGGREGATED),
    # The same, but 1.3 s wait there: 1.235 shares are 1 + 4 * 0.235 = 1.94, against 0.34.
    Row("not at the price of a queue", busy(1_300), SEVEN, PROMPT, Mode.COLOCATED),
    # 0.2 s: 0.685^4 = 0.22. What comes behind is a fifth of such a prompt, and waits from a share
    # of 0.1 up to one of 0.6: 0.2 * (0.6^4 - 0.1^4) = 0.03. Both against 0.34.
    Row("a short queue is worth it", busy(200), SEVEN, PROMPT, Mode.DISAGGREGATED),
    # 1.1 s of the 1.3 are over, by now: 0.25 again.
    Row("nor is one that is nearly read", replace(busy(1_300), reading_since=-1.1), SEVEN, PROMPT,
        Mode.DISAGGREGATED),
    # Of two prompts, half is over at the most: 0.91^4 = 0.69.
    Row("whatever was read of the first",
        replace(busy(1_300), outstanding_prompts=2, reading_since=-1.1), SEVEN, PROMPT,
        Mode.COLOCATED),
    # 0.54^4 and next to nothing against 0.56^4.
    Row("answers with time to spare may be held up", IDLE[0], TWO, PROMPT, Mode.COLOCATED),
    # They take 0.02 / (1 - 0.8) = 0.1 s a token: twice 4 * 0.1 more, for 0.1 of a target too late.
    Row("not where they are held up already", IDLE[0], replace(TWO, reading=0.8), PROMPT,
        Mode.DISAGGREGATED),
    # 10 tokens hold nobody up for long: 0.015^4 against 0.065^4.
    Row("a short prompt stays", IDLE[0], TWO, RequestFacts(10), Mode.COLOCATED),
    Row("so does one that is cached", IDLE[0], SEVEN, replace(PROMPT, cached_tokens={"d": 990}),
        Mode.COLOCATED),
    # 100 of 1,000 are left there: 0.1 s, and then the hand-over.
    Row("and one that is cached elsewhere goes there", *IDLE,
        replace(PROMPT, cached_tokens={"p": 900}), Mode.DISAGGREGATED),
    # A cache without room: 1,100 tokens are lacking, given back at 2,000 in 100 * 0.07 s: 3.85 s.
    # 2.565 shares are 7.26, and the harm, against 2.51 and 7.04.
    Row("a full cache makes both wait", IDLE[0],
        replace(SEVEN, context_tokens=2_000, capacity_tokens=2_000), PROMPT, Mode.DISAGGREGATED),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_cheaper_route_is_taken(row: Row) -> None:
    assert plan(row.prefill, row.decode, row.facts).mode is row.mode


def test_whoever_sends_much_may_wait_longer() -> None:
    """1.77 s elsewhere: 0.885^4 = 0.61 of 2 s, and 0.24 for those behind, against 0.34 colocated,
    but of 3 s 0.59^4 = 0.12 and 0.05 against (1.28 / 3)^4 + 0.17 = 0.21."""
    assert plan(busy(600), SEVEN).mode is Mode.COLOCATED
    patient = replace(AUTO, ttft_target_token_s=1e-3)
    assert plan(busy(600), SEVEN, policy=patient).mode is Mode.DISAGGREGATED


@pytest.mark.parametrize(
    ("first", "taken"),
    [
        # 0.3^16 + (0.3^16 - 0.2^16) against 0.3^16 + 2 * (0.3^16 - 0.2^16).
        pytest.param(replace(ONE, reading=0.5), "d", id="reads half of its time"),
        # 0.6^16 + (0.6^16 - 0.5^16).
        pytest.param(replace(ONE, reading=0.8), "e", id="hardly does anything else"),
        # 1 s in 100 tokens of 0.01 s: no more than half of its time.
        pytest.param(replace(ONE, outstanding_tokens=1_000), "d", id="has something to read"),
        # 0.01 + 8 s / 100 tokens: a whole target, and the other answer's.
        pytest.param(replace(ONE, outstanding_tokens=8_000), "e", id="has much to read"),
    ],
)
def test_an_answer_is_written_where_prompts_leave_it_time(first: WorkerView, taken: str) -> None:
    other = WorkerView("e", 2, writing=2)
    pairs = {("p", "d"): ("nixl",), ("p", "e"): ("nixl",)}
    snapshot = Snapshot(IDLE[:1], (first, other), pairs, 0, ESTIMATES)
    assert choose(snapshot, replace(AUTO, mode=Mode.DISAGGREGATED), PROMPT).decode == taken


@pytest.mark.parametrize(
    ("facts", "prefill", "mode"),
    [
        # 0.2 s wait there, as above: 0.25 against 0.34.
        (PROMPT, busy(200), Mode.DISAGGREGATED),
        # 2.17 s are 1.34, and as much as it reads itself waits behind it from a half to a whole
        # target: 0.94; against 0.34.
        (replace(PROMPT, queue_s={Role.PREFILL: 1.0}), IDLE[0], Mode.COLOCATED),
        # 0.12 against 1.73.
        (replace(PROMPT, queue_s={Role.DECODE: 1.0}), busy(0), Mode.DISAGGREGATED),
    ],
    ids=["no wait", "it would wait for a reader", "it would wait for a writer"],
)
def test_what_it_waits_in_the_coordinator_counts(
    facts: RequestFacts, prefill: WorkerView, mode: Mode
) -> None:
    assert plan(prefill, SEVEN, facts).mode is mode


@pytest.mark.parametrize(
    ("tokens", "taken"),
    [
        # On the free worker it would take 3 s and a step of 0.02 s in each of 12 chunks: as long
        # as the other one, 3.24 s. 40 answers end in 100 * 0.02 s: 20 chats a second would find
        # none free for 1.62 of their 2 s, and cost 20 * 2 * (0.2 + 0.62 + 2 * 0.62^2) = 64.
        # It may wait 11 s itself, of which it takes 6.48 behind the other one: 0.59^4 = 0.12.
        (3_000, "d"),
        # 0.12 s are next to nothing for those, and 3.36 s of its 2.3 s cost 2.8.
        (100, "e"),
    ],
)
def test_a_long_prompt_does_not_take_the_last_free_worker(tokens: int, taken: str) -> None:
    timings = replace(TIMINGS, sequence_s=1e-3)
    views = (WorkerView("d", 20, 3_000, writing=20), WorkerView("e", 20, writing=20))
    snapshot = Snapshot((), views, {}, 0, replace(ESTIMATES, pools={"": timings}))
    policy = ModelPolicy(Mode.COLOCATED, ttft_target_s=2.0, ttft_target_token_s=3e-3)
    assert choose(snapshot, policy, RequestFacts(tokens)).decode == taken


def test_it_says_why_in_words_and_numbers() -> None:
    assert plan(busy(600), WorkerView("d", 4, writing=4)).reason == (
        "auto: set for the model; "
        "colocated would start in 1.16 s and hold up 4 running answers by 250 ms a step "
        "(cost 0.11), disaggregated would start in 1.74 s and hold nobody up (cost 0.81)"
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


@pytest.mark.parametrize(
    ("tokens", "mode", "words"),
    [
        (511, Mode.DISAGGREGATED, "511 uncached prompt tokens < 512"),
        (512, Mode.COLOCATED, "512 uncached prompt tokens >= 512"),
    ],
)
def test_meanwhile_one_in_eight_goes_the_other_way(tokens: int, mode: Mode, words: str) -> None:
    def given(turn: int, estimates: Estimates) -> Plan:
        snapshot = Snapshot(IDLE[:1], IDLE[1:], {("p", "d"): ("nixl",)}, turn, estimates)
        return choose(snapshot, AUTO, RequestFacts(tokens))

    unlearnt = replace(ESTIMATES, pools={})
    assert [given(turn, unlearnt).mode is mode for turn in range(16)] == [*[False] * 7, True] * 2
    assert given(7, unlearnt).reason == (
        f"auto: set for the model; {words}, but this one goes the other way, to learn what it takes"
    )
    assert given(7, ESTIMATES).mode is Mode.COLOCATED


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
def test_a_longer_queue_makes_no_hand_over_cheaper(
    queue: int, more: int, writing: int, tokens: int
) -> None:
    decode, facts = WorkerView("d", writing, writing=writing), RequestFacts(tokens)
    now, later = (
        Forecast(Snapshot((it,), (decode,), PAIRS, 0, ESTIMATES), AUTO, facts).disaggregated(
            it, decode
        )
        for it in (busy(queue), busy(queue + more))
    )
    assert now.cost <= later.cost
    assert now.start_s < later.start_s


@given(queue=st.integers(0, 20_000), tokens=st.integers(1, 20_000))
def test_a_writer_without_answers_reads_for_itself(queue: int, tokens: int) -> None:
    assert plan(busy(queue), IDLE[1], RequestFacts(tokens)).mode is Mode.COLOCATED


def test_a_long_queue_leaves_the_only_worker_free_that_reads_others_soon() -> None:
    # Read by the writer, it would shut out chats for 13 s; with 3 s to read elsewhere they have
    # somewhere to go meanwhile, with 19 s they have not.
    decode, facts = WorkerView("d", 1, writing=1), RequestFacts(12_774)
    assert plan(busy(3_075), decode, facts).mode is Mode.COLOCATED
    assert plan(busy(19_062), decode, facts).mode is Mode.DISAGGREGATED


@given(writing=st.integers(0, 200), tokens=st.integers(1, 5_000))
def test_the_queue_for_prefill_cannot_grow_for_ever(writing: int, tokens: int) -> None:
    """Whatever it would do to answers: each can be harmed once, but waiting only grows."""
    decode = WorkerView("d", writing, writing=writing)
    assert plan(busy(2_000 * (writing + 100)), decode, RequestFacts(tokens)).mode is Mode.COLOCATED
