"""What each load generator says of a run, in the same terms. Pure.

They call different things by the same names. Here TPOT is the time from the first token of an
answer to its last one, by tokens after the first, of each request: `tpot` of ours and of vLLM's,
and what guidellm calls inter-token latency (its own TPOT has the time to the first token in it).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from measure.bench import document
from measure.stats import Percentiles


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds; `tokens_per_s` are tokens of answers, `prompt_tokens` those of a prompt on
    average, as the server counts them."""

    requests: int
    failed: int
    prompt_tokens: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    tokens_per_s: float


def of_pdserve(data: bytes) -> Figures:
    (run,) = document.decode(data).targets[0].runs
    ttft, tpot = _known(run.ttft_s), _known(run.tpot_s)
    return Figures(
        run.requests,
        run.failed,
        run.prompt_tokens / (run.requests - run.failed),
        ttft.p50 * 1000,
        ttft.p99 * 1000,
        tpot.p50 * 1000,
        tpot.p99 * 1000,
        run.answer_tokens / run.duration_s,
    )


def of_vllm(data: bytes) -> Figures:
    told = json.loads(data)
    return Figures(
        told["completed"] + told["failed"],
        told["failed"],
        told["total_input_tokens"] / told["completed"],
        told["median_ttft_ms"],
        told["p99_ttft_ms"],
        told["median_tpot_ms"],
        told["p99_tpot_ms"],
        told["output_throughput"],
    )


def of_guidellm(data: bytes) -> Figures:
    (benchmark,) = json.loads(data)["benchmarks"]
    metrics = benchmark["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    tpot = metrics["inter_token_latency_ms"]["successful"]["percentiles"]
    totals = metrics["request_totals"]
    return Figures(
        totals["total"],
        totals["errored"] + totals["incomplete"],
        metrics["prompt_token_count"]["successful"]["mean"],
        ttft["p50"],
        ttft["p99"],
        tpot["p50"],
        tpot["p99"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def _known(percentiles: Percentiles | None) -> Percentiles:
    if percentiles is None:
        raise ValueError("no request was answered")
    return percentiles
