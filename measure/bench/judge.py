"""What answers come to under an SLO, the warm-up left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from measure.bench.answer import Answer
from measure.bench.document import Run, Window
from measure.plan.slo import Constraint, Slo
from measure.stats import Percentiles, percentiles

LATE_S = 0.05
"""A client that sends later than this at p99 is the one that is measured, not the server."""
FAILED = 0.01
"""Part of the requests that may fail within an SLO at p99."""
_WINDOWS = 20
_LEAST_REQUESTS = 10
"""A run is shared out into so many windows, or into fewer that have so many requests on average."""

_Due = tuple[float, Answer]


def judge(
    due_s: Sequence[float], answers: Sequence[Answer], seconds: float, warm_up_s: float, slo: Slo
) -> Run:
    """Of requests that were due `due_s` after the beginning, within `seconds`; at least one after
    the warm-up."""
    counted = [(at, it) for at, it in zip(due_s, answers, strict=True) if at >= warm_up_s]
    kept = [it for _, it in counted]
    whole = [it for it in kept if not it.failure]
    first_s = [it.first_s for it in whole]
    gaps_s = [gap for it in whole for gap in it.gaps_s]
    ttft, itl = percentiles(first_s), percentiles(gaps_s)
    late_p99_s = float(np.percentile([it.late_s for it in kept], 99))
    failed = 1 - len(whole) / len(kept)
    ends = [at + it.end_s for at, it in counted if not it.failure]
    return Run(
        offered=len(kept) / (seconds - warm_up_s),
        duration_s=max([*ends, seconds]) - warm_up_s,
        requests=len(kept),
        failures=dict(Counter(it.failure for it in kept if it.failure)),
        modes=dict(Counter(it.mode for it in whole if it.mode)),
        prompt_tokens=sum(it.prompt_tokens for it in whole),
        answer_tokens=sum(it.answer_tokens for it in whole),
        ttft_s=ttft,
        itl_s=itl,
        tpot_s=percentiles([it.tpot_s for it in whole if it.answer_tokens > 1]),
        latency_s=percentiles([it.end_s for it in whole]),
        good=sum(_good(it, slo) for it in whole),
        late_p99_s=late_p99_s,
        client_limited=late_p99_s > LATE_S,
        broken=_broken(ttft, itl, failed, slo),
        windows=_windows(counted, warm_up_s, seconds, slo),
        ttft_percentiles_s=_distribution(first_s),
        itl_percentiles_s=_distribution(gaps_s),
    )


def _good(answer: Answer, slo: Slo) -> bool:
    return (
        not answer.failure and answer.first_s <= slo.ttft_p99_s and answer.tpot_s <= slo.itl_p99_s
    )


def _windows(counted: Sequence[_Due], begin_s: float, end_s: float, slo: Slo) -> list[Window]:
    number = min(_WINDOWS, max(1, len(counted) // _LEAST_REQUESTS))
    width_s = (end_s - begin_s) / number
    shares: dict[int, list[Answer]] = {}
    for at_s, answer in counted:
        shares.setdefault(min(number - 1, int((at_s - begin_s) / width_s)), []).append(answer)
    return [
        Window(
            begin_s + (place + 0.5) * width_s,
            len(share),
            sum(_good(it, slo) for it in share),
            percentiles([it.first_s for it in share if not it.failure]),
            percentiles([gap for it in share if not it.failure for gap in it.gaps_s]),
        )
        for place, share in sorted(shares.items())
    ]


def _broken(
    ttft: Percentiles | None, itl: Percentiles | None, failed: float, slo: Slo
) -> Constraint | None:
    """What of the SLO is not met; of two the one that is missed by more."""
    if failed > FAILED or ttft is None:
        return Constraint.FAILURES
    late = ttft.p99 / slo.ttft_p99_s
    slow = itl.p99 / slo.itl_p99_s if itl else 0.0
    if max(late, slow) <= 1:
        return None
    return Constraint.TTFT if late > slow else Constraint.ITL


def _distribution(seconds: Sequence[float]) -> list[float]:
    return [float(it) for it in np.percentile(seconds, range(101))] if seconds else []
