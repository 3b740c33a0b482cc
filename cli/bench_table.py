"""Measurements on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from measure.bench.document import Quantiles, Run
    from measure.bench.targets import Measured


def picture(found: Sequence[Measured]) -> Group:
    """A column for each target; the median of its runs."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for one in found:
        table.add_column(one.target.name, justify="right")
    rows = {
        "requests a second": [f"{median(run.offered for run in it.runs):.3g}" for it in found],
        "within the SLO": [
            f"{sum(run.good for run in it.runs) / sum(run.requests for run in it.runs):.1%}"
            for it in found
        ],
        "failed": [str(sum(sum(run.failures.values()) for run in it.runs)) for it in found],
        "TTFT p50 / p99, ms": [_times([run.ttft_s for run in it.runs]) for it in found],
        "ITL p50 / p99, ms": [_times([run.itl_s for run in it.runs]) for it in found],
        "output tokens a second": [_tokens(it.runs) for it in found],
    }
    if any(it.saturation for it in found):
        rows["saturated at"] = [_saturation(it) for it in found]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    parts: list[RenderableType] = [table]
    for it in found:
        if any(run.client_limited for run in it.runs):
            late = max(run.late_p99_s for run in it.runs) * 1000
            parts.append(
                Text(
                    f"{it.target.name}: this client sent up to {late:.0f} ms late at p99, and is "
                    "itself what was measured; run it on a faster or less busy machine",
                    "bold yellow",
                )
            )
    return Group(*parts)


def _times(quantiles: Sequence[Quantiles | None]) -> str:
    known = [it for it in quantiles if it is not None]
    if not known:
        return "-"
    p50, p99 = median(it.p50 for it in known), median(it.p99 for it in known)
    return f"{p50 * 1000:.1f} / {p99 * 1000:.1f}"


def _tokens(runs: Sequence[Run]) -> str:
    return f"{sum(it.answer_tokens for it in runs) / sum(it.duration_s for it in runs):.1f}"


def _saturation(one: Measured) -> str:
    found = one.saturation
    if found is None:
        return "-"
    if found.client_limited:
        return f"over {found.rate:.3g}/s: the client is the limit"
    return f"{found.rate:.3g}/s, {found.constraint}"
