"""Routes and routing policies side by side, on the same fleet and the same traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.policy.balance import POLICIES
from measure.page import Row, Section, table
from measure.simulation.roofline import GPUS, MODELS
from measure.simulation.trace_run import Seen, Setup, Targets, simulate, summary
from measure.simulation.traces import Arrival, bimodal, faster, load, short
from pdserve.types import Mode

SECTION = Section("comparison", "pdserve simulate compare FOLDER --write docs/simulation.md")

WORKERS = 4
SPLITS = (1, 2, 3)
"""Workers that read for others; the best one stands for the mode."""
TARGETS = {
    "balanced": Targets(ttft_s=1.0, tpot_s=0.015),
    "tight TTFT": Targets(ttft_s=0.5, tpot_s=0.1),
    "tight TPOT": Targets(ttft_s=5.0, tpot_s=0.0125),
}
"""Those that a run is planned for, the first, and others that it is judged by."""
_MAIN = "balanced"

_FLEET = Setup(Mode.COLOCATED, WORKERS, 0, MODELS["llama-3.1-8b"], GPUS["h100"])

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Named arrivals, and how they are made from a folder of public traces."""

    name: str
    arrivals: Callable[[Path], list[Arrival]]


def _window(pattern: str, speedup: float, seconds: float) -> Callable[[Path], list[Arrival]]:
    def arrivals(folder: Path) -> list[Arrival]:
        found = sorted(folder.glob(pattern))
        if not found:
            raise FileNotFoundError(f"{folder} holds no {pattern}")
        return [one for one in faster(load(found[0]), speedup) if one.at_s < seconds]

    return arrivals


TRAFFIC = (
    Traffic("Azure code", _window("*code*.csv", 12.0, 60.0)),
    Traffic("Azure chat", _window("*conv*.csv", 8.0, 60.0)),
    Traffic("Mooncake", _window("*conversation*.jsonl", 1.2, 120.0)),
    Traffic("bimodal", lambda _: bimodal(30.0, 44.0, 1)),
    Traffic("all short", lambda _: short(20.0, 100.0, 1)),
)
"""Near to what four H100 can serve of each."""


@dataclass(frozen=True, slots=True)
class Run:
    """One fleet under one traffic; `prefill` as in Setup."""

    traffic: str
    mode: Mode
    prefill: int
    seen: Seen

    def goodput(self, targets: str) -> float:
        return summary(self.seen, TARGETS[targets]).goodput


def compare(folder: Path, report: Report) -> str:
    """The generated part of the page. Raises OSError or TraceError."""
    runs = []
    for traffic in TRAFFIC:
        arrivals = traffic.arrivals(folder)
        for mode in Mode:
            for prefill in (0,) if mode is Mode.COLOCATED else SPLITS:
                report(f"{traffic.name}, {mode}, {prefill} of {WORKERS} read for others")
                setup = replace(_FLEET, mode=mode, prefill=prefill, targets=TARGETS[_MAIN])
                runs.append(Run(traffic.name, mode, prefill, simulate(arrivals, setup)))
    return render(runs, _policies(folder, report))


def _policies(folder: Path, report: Report) -> str:
    """Balance policies on traffic whose prompts share prefixes."""
    arrivals = _window("*conversation*.jsonl", 2.5, 120.0)(folder)
    rows: list[Row] = []
    for balance in POLICIES:
        report(f"Mooncake, {balance}")
        seen = simulate(arrivals, replace(_FLEET, workers=8, balance=balance))
        told = summary(seen, TARGETS[_MAIN])
        ttft = told.ttft_ms
        times = f"{ttft.p50:,.0f} / {ttft.p90:,.0f} / {ttft.p99:,.0f}"
        rows.append((balance, f"{told.hit_rate:.1%}", times, f"{told.goodput:.1f}"))
    return table(("policy", "hits", "TTFT p50 / p90 / p99, ms", "good requests/s"), rows)


def best(runs: list[Run], traffic: str, mode: Mode, targets: str) -> Run:
    """The split with the most goodput stands for a mode."""
    return max(
        (run for run in runs if (run.traffic, run.mode) == (traffic, mode)),
        key=lambda run: run.goodput(targets),
    )


def modes_table(runs: list[Run], targets: str) -> str:
    rows: list[Row] = []
    for traffic in dict.fromkeys(run.traffic for run in runs):
        by_mode = {mode: best(runs, traffic, mode, targets) for mode in Mode}
        colocated, split, auto = (by_mode[mode].goodput(targets) for mode in _ORDER)
        rows.append(
            (
                traffic,
                f"{colocated:.1f}",
                f"{split:.1f} ({by_mode[Mode.DISAGGREGATED].prefill}:"
                f"{WORKERS - by_mode[Mode.DISAGGREGATED].prefill})",
                f"{auto:.1f}",
                f"{auto / max(colocated, split, 1e-9) - 1:+.0%}",
            )
        )
    return table(("good requests/s", "colocated", "disaggregated (P:D)", "auto", "auto"), rows)


_ORDER = (Mode.COLOCATED, Mode.DISAGGREGATED, Mode.AUTO)


def latencies_table(runs: list[Run]) -> str:
    rows: list[Row] = []
    for traffic in dict.fromkeys(run.traffic for run in runs):
        for mode in _ORDER:
            run = best(runs, traffic, mode, _MAIN)
            told = summary(run.seen, TARGETS[_MAIN])
            rows.append(
                (
                    f"{traffic}, {mode}",
                    f"{told.ttft_ms.p50:,.0f} / {told.ttft_ms.p90:,.0f} / {told.ttft_ms.p99:,.0f}",
                    f"{told.itl_ms.p50:.1f} / {told.itl_ms.p90:.1f} / {told.itl_ms.p99:.1f}",
                    f"{told.modes.get('disaggregated', 0) / max(1, told.requests):.0%}",
                    f"{told.hit_rate:.0%}",
                    f"{told.gpu_hours:.3f}",
                )
            )
    header = ("", "TTFT p50 / p90 / p99, ms", "ITL, ms", "disaggregated", "hits", "GPU-hours")
    return table(header, rows)


def render(runs: list[Run], policies: str) -> str:
    """The page's part, from all runs of modes and the table of policies."""
    parts = []
    for name, targets in TARGETS.items():
        ttft, tpot = targets.ttft_s, targets.tpot_s * 1000
        parts += [
            f"Goodput, {name}: first token within {ttft:g} s, {tpot:g} ms a token after it.",
            modes_table(runs, name),
        ]
    parts += [
        f"Latencies of the runs that stand for their modes, {_MAIN}.",
        latencies_table(runs),
        "Balance policies on Mooncake, colocated.",
        policies,
    ]
    return SECTION.render(parts)
