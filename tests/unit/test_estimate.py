"""What the estimator learns of engines whose constants are known."""

from __future__ import annotations

import math
from random import Random

import pytest

from coordinator.policy.estimate import SHORTEST_STEP_S, Estimator, Timings
from pdserve.types import EngineWork

CAPACITY = 100_000
CPU = Timings(step_s=0.03, token_s=1.5e-3, pair_s=5e-8, sequence_s=2e-3, context_s=1e-6)
GPU = Timings(step_s=0.008, token_s=2.7e-5, pair_s=9e-10, sequence_s=3e-5, context_s=5e-8)


def work(truth: Timings, random: Random, *, reads: bool = True, writes: bool = True) -> EngineWork:
    """Half a second or so of steps, each with up to 256 prompt tokens and 20 answers."""
    total = EngineWork()
    for _ in range(10):
        tokens = random.randrange(256) if reads else 0
        pairs = tokens * random.randrange(4_000)
        sequences = random.randrange(1, 20) if writes else 0
        usage = random.random() if writes else 0.0
        seconds = (
            truth.step_s
            + truth.token_s * tokens
            + truth.pair_s * pairs
            + truth.sequence_s * sequences
            + truth.context_s * usage * CAPACITY
        )
        total += EngineWork(1, seconds * random.uniform(0.9, 1.1), tokens, pairs, sequences, usage)
    return total


@pytest.mark.parametrize("truth", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_finds_what_steps_take(truth: Timings) -> None:
    estimator, random = Estimator(), Random(1)
    for _ in range(300):
        estimator.observe_work("decode", work(truth, random), CAPACITY)
    learnt = estimator.estimates.of("decode")
    assert learnt.reads_learnt
    assert learnt.writes_learnt
    for name in ("step_s", "token_s", "pair_s", "sequence_s", "context_s"):
        assert getattr(learnt, name) == pytest.approx(getattr(truth, name), rel=0.25), name


def test_it_follows_an_engine_that_gets_slower() -> None:
    estimator, random = Estimator(), Random(1)
    for token_s in (1e-4, 4e-4):
        for _ in range(3_000):
            truth = Timings(step_s=0.0, token_s=token_s, pair_s=0.0)
            estimator.observe_work("prefill", work(truth, random, writes=False), CAPACITY)
    assert estimator.estimates.of("prefill").token_s == pytest.approx(4e-4, rel=0.1)


def test_pools_are_learnt_apart_and_say_what_is_not_learnt_yet() -> None:
    estimator, random = Estimator(), Random(1)
    for _ in range(20):
        estimator.observe_work("prefill", work(GPU, random, writes=False), CAPACITY)
        estimator.observe_work("decode", work(CPU, random, reads=False), CAPACITY)
    prefill, decode = (estimator.estimates.of(pool) for pool in ("prefill", "decode"))
    assert (prefill.reads_learnt, prefill.writes_learnt) == (True, False)
    assert (decode.reads_learnt, decode.writes_learnt) == (False, True)
    assert prefill.token_s == pytest.approx(GPU.token_s, rel=0.5)
    assert estimator.estimates.of("nobody") == Timings()


def test_no_weight_is_negative_and_nonsense_is_passed_over() -> None:
    estimator = Estimator()
    estimator.observe_work("decode", EngineWork(-5, -1.0, -100, 0, -5, 0.0), CAPACITY)
    estimator.observe_work("decode", EngineWork(0, 0.0), CAPACITY)
    assert estimator.estimates.pools == {}
    # Longer steps that read less: no line without negative weights goes through both.
    for _ in range(50):
        estimator.observe_work("decode", EngineWork(1, 0.5, 10), CAPACITY)
        estimator.observe_work("decode", EngineWork(1, 0.1, 1_000), CAPACITY)
    learnt = estimator.estimates.of("decode")
    assert min(learnt.step_s, learnt.token_s, learnt.pair_s, learnt.sequence_s) >= 0


ABSURD = {
    "denormal": EngineWork(10, 5e-324, 1_000),
    "no time": EngineWork(10, 1e-9, 1_000),
    "far too short": EngineWork(10, 20 * SHORTEST_STEP_S, 100, 100_000, 100, 5.0),
    "negative": EngineWork(10, -1.0, 1_000),
    "as long as nobody waits": EngineWork(10, 1e300, 1_000),
    "long": EngineWork(10, 60.0, 1_000, 10_000, 100, 5.0),
    "no number": EngineWork(10, math.nan, 1_000),
    "never over": EngineWork(10, math.inf, 1_000),
    "more steps than can be": EngineWork(10**30, 0.5, 1_000),
    "more tokens than can be": EngineWork(10, 0.5, 10**30),
    "fewer than none": EngineWork(10, 0.5, 100, -(10**9)),
    "more context than can be": EngineWork(10, 0.5, 100, 100, 100, 1e12),
}


def step_of(timings: Timings) -> float:
    """Seconds of a step with a prompt's last 200 tokens of 4,000 and 10 answers."""
    written_s = 10 * timings.sequence_s + 50_000 * timings.context_s
    return timings.step_s + timings.reading_s(200, 200 * 3_900) + written_s


@pytest.mark.parametrize("absurd", ABSURD.values(), ids=ABSURD)
def test_one_absurd_report_does_not_spoil_what_was_learnt(absurd: EngineWork) -> None:
    estimator, random = Estimator(), Random(1)
    for turn in range(100):
        estimator.observe_work("decode", work(GPU, random), CAPACITY)
        if turn == 50:
            estimator.observe_work("decode", absurd, CAPACITY)
    learnt = estimator.estimates.of("decode")
    assert step_of(learnt) == pytest.approx(step_of(GPU), rel=0.1)


@pytest.mark.parametrize("absurd", [math.nan, math.inf, 1e300, -1e300, 5e-324])
def test_one_absurd_hand_over_does_not_spoil_what_was_learnt(absurd: float) -> None:
    estimator = Estimator()
    for turn in range(50):
        estimator.observe_hand_over(1_000, 0.1)
        if turn == 25:
            estimator.observe_hand_over(1_000, absurd)
    hand_over = estimator.estimates.hand_over
    assert hand_over.base_s + 1_000 * hand_over.token_s == pytest.approx(0.1, rel=0.05)


def test_an_engine_that_says_its_steps_take_no_time_is_not_believed() -> None:
    estimator = Estimator()
    for _ in range(50):
        assert not estimator.observe_work("prefill", EngineWork(10, 1e-9, 1_000), CAPACITY)
    assert estimator.estimates.of("prefill") == Timings()


def test_hand_overs_and_answers() -> None:
    estimator, random = Estimator(), Random(1)
    for _ in range(500):
        tokens = random.randrange(100, 10_000)
        estimator.observe_hand_over(tokens, (0.05 + 1e-5 * tokens) * random.uniform(0.9, 1.1))
        estimator.observe_answer(40)
    hand_over = estimator.estimates.hand_over
    assert hand_over.learnt
    assert hand_over.base_s == pytest.approx(0.05, rel=0.2)
    assert hand_over.token_s == pytest.approx(1e-5, rel=0.2)
    assert estimator.estimates.answer_tokens == pytest.approx(40, rel=0.01)
