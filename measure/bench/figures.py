"""What was measured, in the words of a table: of each target over its runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from measure.bench.document import Run, Target
from measure.stats import Percentiles


def rows(targets: Sequence[Target]) -> dict[str, list[str]]:
    """By the name of a figure, that of each target; times are the medians of its runs."""
    found = {
        "requests a second": [f"{median(run.offered for run in it.runs):.3g}" for it in targets],
        "within the SLO": [_attainment(it.runs) for it in targets],
        "failed": [str(sum(run.failed for run in it.runs)) for it in targets],
        "TTFT p50 / p99, ms": [_times([run.ttft_s for run in it.runs]) for it in targets],
        "ITL p50 / p99, ms": [_times([run.itl_s for run in it.runs]) for it in targets],
        "output tokens a second": [_tokens(it.runs) for it in targets],
    }
    if any(it.saturation for it in targets):
        found["saturated at"] = [_saturation(it) for it in targets]
    return found


def warnings(targets: Sequence[Target]) -> list[str]:
    """Where it was not the server that was measured."""
    late_s = {
        it.name: max(run.late_p99_s for run in it.runs)
        for it in targets
        if any(run.client_limited for run in it.runs)
    }
    return [
        f"{name}: this client sent up to {late * 1000:.0f} ms late at p99, and is itself what was "
        "measured; run it on a faster or less busy machine"
        for name, late in late_s.items()
    ]


def milliseconds(percentiles: Percentiles | None) -> str:
    """The median and the 99th percentile."""
    return _times([percentiles])


def _attainment(runs: Sequence[Run]) -> str:
    return f"{sum(it.good for it in runs) / sum(it.requests for it in runs):.1%}"


def _times(percentiles: Sequence[Percentiles | None]) -> str:
    known = [it for it in percentiles if it is not None]
    if not known:
        return "-"
    p50, p99 = median(it.p50 for it in known), median(it.p99 for it in known)
    return f"{p50 * 1000:.1f} / {p99 * 1000:.1f}"


def _tokens(runs: Sequence[Run]) -> str:
    return f"{sum(it.answer_tokens for it in runs) / sum(it.duration_s for it in runs):.1f}"


def _saturation(target: Target) -> str:
    found = target.saturation
    if found is None:
        return "-"
    if found.client_limited:
        return f"over {found.rate:.3g}/s: the client is the limit"
    return f"{found.rate:.3g}/s, {found.constraint}"
