"""Load and what clients saw of it: due times, ends that are none, and figures worked by hand."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from statistics import fmean, pvariance

import httpx
import pytest
from rich.console import Console

from cli.bench_progress import Shown
from measure.bench import targets
from measure.bench.answer import Answer, ask
from measure.bench.arrivals import gamma, replayed
from measure.bench.document import (
    SCHEMA,
    Document,
    DocumentError,
    Saturation,
    capacities,
    decode,
    encode,
)
from measure.bench.document import Target as DocumentTarget
from measure.bench.drive import Target
from measure.bench.judge import judge
from measure.bench.summary import Targets, summarise
from measure.bench.targets import Load
from measure.plan.sizing import Measured
from measure.plan.slo import Constraint, Slo
from measure.processes import BenchError
from measure.simulation.traces import Arrival
from measure.stats import Percentiles

ROLE = 'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = "data: [DONE]\n\n"
TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)


async def asked(*events: str, status: int = 200) -> Answer:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield event.encode()

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body(), headers={"x-pdserve-mode": "auto"})

    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://fake"
    ) as client:
        return await ask(client, "/", {}, 5, due=time.monotonic() - 100)


async def test_times_count_from_when_a_request_was_due() -> None:
    answer = await asked(ROLE, WORD, WORD, USAGE, DONE)
    assert answer.late_s >= 100
    assert answer.first_s >= 100
    assert answer.end_s >= answer.first_s
    assert len(answer.gaps_s) == 1
    assert (answer.prompt_tokens, answer.answer_tokens, answer.mode) == (7, 2, "auto")
    assert not answer.failure


@pytest.mark.parametrize(
    ("events", "status", "failure"),
    [
        ((ROLE, WORD), 200, "ended without [DONE]"),
        ((WORD, 'data: {"error":{"message":"lost"}}\n\n'), 200, "broke off: lost"),
        ((), 503, "HTTP 503"),
    ],
)
async def test_an_answer_that_is_none_is_a_failure(
    events: tuple[str, ...], status: int, failure: str
) -> None:
    assert (await asked(*events, status=status)).failure == failure


def test_a_summary_counts_what_met_both_targets() -> None:
    answers = [
        Answer(10, first_s=0.5, end_s=1.5, gaps_s=[0.1] * 10, answer_tokens=11, mode="auto"),
        Answer(10, first_s=1.5, end_s=1.6, gaps_s=[0.1], answer_tokens=2),  # begins late
        Answer(10, first_s=0.1, end_s=0.5, gaps_s=[0.4], answer_tokens=2),  # slow after that
        Answer(10, failure="HTTP 503"),
    ]
    summary = summarise(answers, TARGETS, seconds=2.0)
    assert (summary.requests, summary.good, summary.goodput) == (4, 1, 0.5)
    assert summary.failures == {"HTTP 503": 1}
    assert summary.modes == {"auto": 1}
    assert summary.ttft is not None
    assert summary.ttft.p50 == 0.5
    assert summary.tokens_per_s == 7.5


def test_without_an_answer_there_are_no_times() -> None:
    summary = summarise([Answer(10, failure="HTTP 503")], TARGETS, seconds=2.0)
    assert (summary.ttft, summary.itl, summary.good) == (None, None, 0)


def test_figures_of_one_answer_are_all_percentiles() -> None:
    summary = summarise([Answer(10, first_s=0.5, end_s=0.5, answer_tokens=1)], TARGETS, 1.0)
    assert summary.ttft == Percentiles(0.5, 0.5, 0.5)
    assert summary.itl is None


def slo(ttft_s: float = 1.0, itl_s: float = 0.2) -> Slo:
    return Slo(ttft_s, itl_s)


def answered(first_s: float, *, late_s: float = 0.0, failure: str = "") -> Answer:
    gaps_s = [0.1, 0.1]
    return Answer(10, late_s, first_s, first_s + 0.2, gaps_s, 3, "", failure)


def test_what_was_due_in_the_warm_up_counts_for_nothing() -> None:
    run = judge([0.5, 2.0, 3.0], [answered(9.0), answered(0.5), answered(0.7)], 5.0, 1.0, slo())
    assert (run.requests, run.offered, run.good) == (2, 0.5, 2)
    assert run.ttft_s is not None
    assert run.ttft_s.p50 == pytest.approx(0.6)
    assert run.duration_s == 4.0
    assert run.goodput == 0.5
    assert run.broken is None


def test_windows_share_a_run_out_by_when_requests_were_due() -> None:
    # Of 30 requests there are three windows, each of 2 s after the warm-up.
    due_s = [1.0 + 0.1 * number for number in range(20)] + [5.5] * 10
    answers = [answered(0.1)] * 20 + [answered(3.0)] * 9 + [answered(0.0, failure="HTTP 503")]
    first, last = judge(due_s, answers, 7.0, 1.0, slo()).windows
    assert (first.at_s, first.requests, first.good) == (2.0, 20, 20)
    assert (last.at_s, last.requests, last.good) == (6.0, 10, 0)
    assert last.ttft_s is not None
    assert last.ttft_s.p50 == 3.0


def test_a_distribution_is_its_percentiles() -> None:
    run = judge([1.0] * 101, [answered(it / 100) for it in range(101)], 2.0, 0.0, slo())
    assert run.ttft_percentiles_s == pytest.approx([it / 100 for it in range(101)])
    assert run.itl_percentiles_s == pytest.approx([0.1] * 101)
    failed = judge([1.0], [answered(0.0, failure="HTTP 503")], 2.0, 0.0, slo())
    assert failed.ttft_percentiles_s == []


def test_what_breaks_the_slo_is_said() -> None:
    def broken(*answers: Answer, within: Slo) -> object:
        return judge([1.0] * len(answers), answers, 2.0, 0.0, within).broken

    assert broken(answered(2.0), within=slo()) is Constraint.TTFT
    assert broken(answered(0.5), within=slo(itl_s=0.05)) is Constraint.ITL
    assert (
        broken(answered(0.5), answered(0.0, failure="HTTP 503"), within=slo())
        is Constraint.FAILURES
    )


def test_a_client_that_sends_late_is_told_as_the_limit() -> None:
    assert judge([1.0], [answered(0.5, late_s=0.06)], 2.0, 0.0, slo()).client_limited
    assert not judge([1.0], [answered(0.5, late_s=0.04)], 2.0, 0.0, slo()).client_limited


@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    coming = gamma(burstiness, (10, 20), (5, 5))(10.0, 1_000.0, 1)
    gaps = [after.at_s - before.at_s for before, after in pairwise(coming)]
    mean = fmean(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert pvariance(gaps) / mean**2 == pytest.approx(burstiness, rel=0.15)
    assert {arrival.answer_tokens for arrival in coming} == {5}


def test_a_trace_is_played_at_the_asked_rate() -> None:
    trace = [Arrival(float(number), 10, 5) for number in range(1, 101)]
    coming = replayed(trace)(10.0, 5.05, 0)
    assert len(coming) == 50
    assert coming[0].at_s == pytest.approx(0.1)


def document(saturation: Saturation | None) -> Document:
    run = judge([1.0, 1.5], [answered(0.5), answered(0.5)], 2.0, 0.0, slo())
    target = DocumentTarget("one", "http://one", "m", [run], [], saturation)
    return Document(SCHEMA, "now", "here", "pdserve bench", "poisson", Slo(1, 1), 0, [target])


def test_a_plan_reads_what_was_measured() -> None:
    data = encode(document(Saturation(4.0, Constraint.TTFT, client_limited=False)))
    assert decode(data).targets[0].runs[0].requests == 2
    # Ten prompt tokens and three of the answer.
    assert capacities(data, 2) == {"one": Measured(4.0, 2, Constraint.TTFT, 13.0)}


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(DocumentError, match="no file of pdserve bench"):
        decode(b"{}")
    other = encode(document(None)).replace(SCHEMA.encode(), b"pdserve-bench/0")
    with pytest.raises(DocumentError, match="schema"):
        decode(other)
    with pytest.raises(DocumentError, match="schema"):
        decode(b'{"schema": "pdserve-bench/1"}')
    with pytest.raises(DocumentError, match="not looked for"):
        capacities(encode(document(None)), 1)


def test_nothing_is_planned_by_what_a_client_could_not_send() -> None:
    found = document(Saturation(4.0, Constraint.ITL, client_limited=True))
    with pytest.raises(DocumentError, match="one serves more than 4 requests/s"):
        capacities(encode(found), 1)


def test_targets_take_turns_and_saturate_where_they_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that answers in 10 ms times the rate squared: 1 s is reached at 10 a second."""
    order: list[str] = []

    seeds: list[int] = []

    async def served(
        target: Target, coming: Sequence[Arrival], seed: int, answered_one: Callable[[], None]
    ) -> list[Answer]:
        order.append(target.name)
        seeds.append(seed)
        for _arrival in coming:
            answered_one()
        rate = len(coming) / 20.0
        slow = 4.0 if target.name == "slow" else 1.0
        return [answered(0.01 * slow * rate**2) for _ in coming]

    monkeypatch.setattr(targets, "drive", served)

    def even(rate: float, seconds: float, _: int) -> list[Arrival]:
        return [Arrival(number / rate, 10, 3) for number in range(int(rate * seconds))]

    load = Load(even, 4.0, 20.0, 0.0, slo())
    two = [Target("fast", "", ""), Target("slow", "", "")]
    seen = Seen()
    fast, slow = targets.measure(two, load, 2, saturate=True, watch=seen)
    assert order[:4] == ["fast", "slow", "slow", "fast"]
    # So do their searches, for as long as both go on.
    searched = order[4:]
    both = 2 * min(len(fast.search), len(slow.search))
    assert len(searched) == len(fast.search) + len(slow.search)
    assert searched[:both] == (["fast", "slow", "slow", "fast"] * both)[:both]
    assert seen.words[:2] == ["fast: round 1 of 2, 4/s", "slow: round 1 of 2, 4/s"]
    assert seen.words[4] == "fast: is it saturated at 4/s?"
    assert len(seen.words) == len(order)
    assert seen.asked == seen.told > 0
    # Nobody finds in a cache what another target, or an earlier run, was asked.
    assert len(set(seeds)) == len(order)
    assert fast.saturation is not None
    assert slow.saturation is not None
    assert fast.saturation.rate == pytest.approx(10.0, rel=0.04)
    assert slow.saturation.rate == pytest.approx(5.0, rel=0.04)
    assert slow.saturation.constraint is Constraint.TTFT
    with pytest.raises(BenchError, match="nothing is due"):
        targets.measure(two, replace(load, warm_up_s=30.0), 1, saturate=False, watch=seen)


class Seen:
    """What a bench told of how far it was."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.asked = self.told = 0

    def begins(self, words: str, requests: int) -> None:
        self.words.append(words)
        self.asked += requests

    def answered(self) -> None:
        self.told += 1


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_it_is_is_shown_on_a_terminal_alone(*, terminal: bool) -> None:
    out = StringIO()
    with Shown(Console(file=out, force_terminal=terminal, width=80)) as shown:
        shown.begins("[b]one[/b]: round 1 of 1", 2)
        shown.answered()
    assert ("[b]one[/b]: round 1 of 1" in out.getvalue()) is terminal
    assert ("1/2" in out.getvalue()) is terminal
