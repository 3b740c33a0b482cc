"""What was measured, as pictures: of each a colour for every target. Needs matplotlib.

No text of a user's goes into them: whose colour is whose stands beside them, on their page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from itertools import cycle

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from measure.bench.document import Document, Run, Target, Window
from measure.stats import Percentiles

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)
"""Okabe and Ito's, which people who see fewer colours can tell apart ("Color Universal Design",
2008), the yellow of which is too light for lines; where there are more targets, again."""

_Plot = Callable[[Axes], None]
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def over_time(document: Document) -> str:
    """SVG: latencies by when requests were due, a line for each run."""

    def plot(title: str, of: Callable[[Window], Percentiles | None], limit_s: float) -> _Plot:
        def draw(axes: Axes) -> None:
            for colour, target in coloured(document.targets):
                for run in target.runs:
                    known = [(it.at_s, found) for it in run.windows if (found := of(it))]
                    at_s = [at for at, _ in known]
                    p50 = [_ms(found.p50) for _, found in known]
                    p99 = [_ms(found.p99) for _, found in known]
                    axes.plot(at_s, p50, "-", color=colour, marker=".")
                    axes.plot(at_s, p99, "--", color=colour, marker=".")
            axes.axhline(_ms(limit_s), color="#888888", linestyle=":")
            axes.set(title=title, xlabel="due, s", ylabel="ms", yscale="log")
            _plain(axes.yaxis)

        return draw

    slo = document.slo
    return _svg(
        plot("Time to first token: p50, dashed p99", lambda it: it.ttft_s, slo.ttft_p99_s),
        plot("Time between chunks: p50, dashed p99", lambda it: it.itl_s, slo.itl_p99_s),
    )


def distributions(document: Document) -> str:
    """SVG: what part of all times was below which, a line for each run."""

    def plot(title: str, of: Callable[[Run], list[float]], limit_s: float) -> _Plot:
        def draw(axes: Axes) -> None:
            for colour, target in coloured(document.targets):
                for run in target.runs:
                    times = [_ms(it) for it in of(run)]
                    axes.plot(times, range(len(times)), color=colour)
            axes.axvline(_ms(limit_s), color="#888888", linestyle=":")
            axes.axhline(99, color="#888888", linestyle=":")
            axes.set(title=title, xlabel="ms", ylabel="% below", xscale="log", ylim=(0, 101))
            _plain(axes.xaxis)

        return draw

    slo = document.slo
    return _svg(
        plot("Time to first token", lambda it: it.ttft_percentiles_s, slo.ttft_p99_s),
        plot("Time between chunks", lambda it: it.itl_percentiles_s, slo.itl_p99_s),
    )


def saturation(document: Document) -> str:
    """SVG: what became of each rate that was tried; dotted the rates of saturation."""

    def plot(title: str, label: str, of: Callable[[Run], float]) -> _Plot:
        def draw(axes: Axes) -> None:
            for colour, target in coloured(document.targets):
                tried = sorted((*target.runs, *target.search), key=lambda run: run.offered)
                rates = [run.offered for run in tried]
                axes.plot(rates, [of(run) for run in tried], color=colour, marker=".")
                if target.saturation is not None:
                    axes.axvline(target.saturation.rate, color=colour, linestyle=":")
            axes.set(title=title, xlabel="requests a second", ylabel=label)
            axes.set_ylim(bottom=0)

        return draw

    return _svg(
        plot("Goodput by rate", "requests a second within the SLO", lambda it: it.goodput),
        plot("Attainment by rate", "% within the SLO", lambda it: 100 * it.attainment),
    )


def coloured(targets: Sequence[Target]) -> list[tuple[str, Target]]:
    """In their order."""
    return list(zip(cycle(COLOURS), targets))


def _ms(seconds: float) -> float:
    return seconds * 1000


def _plain(axis: Axis) -> None:
    """Numbers as people write them, on an axis of logarithms."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _svg(*plots: _Plot) -> str:
    # A literal: its type knows every key.
    with rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "pdserve bench",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "grid.alpha": 0.3,
            "lines.linewidth": 1.4,
        }
    ):
        figure = Figure(figsize=(5.2 * len(plots), 3.2), layout="constrained")
        for place, draw in enumerate(plots, 1):
            draw(figure.add_subplot(1, len(plots), place))
        text = StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
        return text.getvalue()
