"""Load and what clients saw of it: due times, ends that are none, and figures worked by hand."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import httpx
import pytest

from measure.bench.answer import Answer, ask
from measure.bench.modes import Mix, arrivals
from measure.bench.summary import Percentiles, Targets, summarise

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


def test_a_mix_has_both_kinds_at_their_rates() -> None:
    mix = Mix("both", chat_rate=2.0, long_rate=0.5)
    coming = arrivals(mix, 1_000.0, seed=1)
    longs = [arrival for arrival in coming if arrival.prompt_tokens >= 1_200]
    # Poisson: 2,000 and 500 are expected, with standard deviations of 45 and 22.
    assert abs(len(coming) - len(longs) - 2_000) < 200
    assert abs(len(longs) - 500) < 100
    assert [arrival.at_s for arrival in coming] == sorted(arrival.at_s for arrival in coming)
    assert coming == arrivals(mix, 1_000.0, seed=1)
    assert not [a for a in arrivals(Mix("chats", 2.0), 100.0, 1) if a.prompt_tokens >= 1_200]
