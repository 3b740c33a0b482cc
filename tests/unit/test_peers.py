"""Load generators side by side: the same terms for what each calls in its own way."""

from __future__ import annotations

import json

from measure.bench.answer import Answer
from measure.bench.document import SCHEMA, Document, Target, encode
from measure.bench.judge import judge
from measure.peers.figures import Figures, of_guidellm, of_pdserve, of_vllm
from measure.peers.generators import Load
from measure.peers.report import Measured, render
from measure.plan.slo import Slo

FIGURES = Figures(2, 1, 10.0, 500.0, 500.0, 100.0, 100.0, 1.5)
"""Of two requests in two seconds, one of them answered: first token at 0.5 s, two more by 0.7 s."""


def test_ours() -> None:
    answers = [Answer(10, 0.0, 0.5, 0.7, [0.1, 0.1], 3), Answer(10, failure="HTTP 503")]
    slo = Slo(1.0, 0.2)
    run = judge([1.0, 1.0], answers, 2.0, 0.0, slo)
    target = Target("one", "http://one", "m", [run], [], None)
    data = encode(Document(SCHEMA, "now", "here", "pdserve bench", "poisson", slo, 0.0, [target]))
    told = of_pdserve(data)
    assert (told.requests, told.failed, told.prompt_tokens, told.tokens_per_s) == (2, 1, 10.0, 1.5)
    assert [round(it, 6) for it in (told.ttft_p50, told.ttft_p99)] == [500.0, 500.0]
    assert [round(it, 6) for it in (told.tpot_p50, told.tpot_p99)] == [100.0, 100.0]


def test_vllms_counts_what_failed_apart() -> None:
    told = {
        "completed": 1,
        "failed": 1,
        "total_input_tokens": 10,
        "median_ttft_ms": 500.0,
        "p99_ttft_ms": 500.0,
        "median_tpot_ms": 100.0,
        "p99_tpot_ms": 100.0,
        "output_throughput": 1.5,
    }
    assert of_vllm(json.dumps(told).encode()) == FIGURES


def test_guidellms_inter_token_latency_is_what_others_call_tpot() -> None:
    def successful(value: float) -> dict[str, object]:
        return {"successful": {"percentiles": {"p50": value, "p99": value}, "mean": value}}

    metrics = {
        "request_totals": {"total": 2, "successful": 1, "errored": 1, "incomplete": 0},
        "prompt_token_count": successful(10.0),
        "time_to_first_token_ms": successful(500.0),
        "inter_token_latency_ms": successful(100.0),
        "time_per_output_token_ms": successful(233.0),
        "output_tokens_per_second": successful(1.5),
    }
    told = {"benchmarks": [{"metrics": metrics}]}
    assert of_guidellm(json.dumps(told).encode()) == FIGURES


def test_a_table_says_how_far_the_medians_are_apart() -> None:
    load = Load(4.0, 10.0, 100, 50)
    assert load.requests == 40
    other = Figures(2, 0, 10.0, 450.0, 500.0, 100.0, 100.0, 1.5)
    text = render([Measured("a", load, FIGURES), Measured("b", load, other)], "here", "run", ())
    assert "| TTFT p50, ms | 500.0 | 450.0 | 10.5% |" in text
    assert "| TTFT p99, ms | 500.0 | 500.0 | 0.0% |" in text
    assert "1 requests failed" in text
