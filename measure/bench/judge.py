"""What answers come to under an SLO, the warm-up left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from measure.bench.answer import Answer
from measure.bench.document import Quantiles, Run
from measure.plan.slo import Constraint, Slo

LATE_S = 0.05
"""A client that sends later than this at p99 is the one that is measured, not the server."""
FAILED = 0.01
"""Part of the requests that may fail within an SLO at p99."""


def judge(
    due_s: Sequence[float], answers: Sequence[Answer], seconds: float, warm_up_s: float, slo: Slo
) -> Run:
    """Of requests that were due `due_s` after the beginning, within `seconds`; at least one after
    the warm-up."""
    counted = [(at, it) for at, it in zip(due_s, answers, strict=True) if at >= warm_up_s]
    kept = [it for _, it in counted]
    whole = [it for it in kept if not it.failure]
    ttft = _quantiles([it.first_s for it in whole])
    itl = _quantiles([gap for it in whole for gap in it.gaps_s])
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
        tpot_s=_quantiles([it.tpot_s for it in whole if it.answer_tokens > 1]),
        latency_s=_quantiles([it.end_s for it in whole]),
        good=sum(it.first_s <= slo.ttft_p99_s and it.tpot_s <= slo.itl_p99_s for it in whole),
        late_p99_s=late_p99_s,
        client_limited=late_p99_s > LATE_S,
        broken=_broken(ttft, itl, failed, slo),
    )


def _broken(
    ttft: Quantiles | None, itl: Quantiles | None, failed: float, slo: Slo
) -> Constraint | None:
    """What of the SLO is not met; of two the one that is missed by more."""
    if failed > FAILED or ttft is None:
        return Constraint.FAILURES
    late = ttft.p99 / slo.ttft_p99_s
    slow = itl.p99 / slo.itl_p99_s if itl else 0.0
    if max(late, slow) <= 1:
        return None
    return Constraint.TTFT if late > slow else Constraint.ITL


def _quantiles(seconds: Sequence[float]) -> Quantiles | None:
    if not seconds:
        return None
    return Quantiles(*map(float, np.percentile(seconds, (50, 90, 99))))
