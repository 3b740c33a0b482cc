"""Routes and routing policies side by side, on the same fleet and the same traffic.

Goodput as in DistServe (Zhong et al., OSDI 2024): the highest rate at which 90 % of the requests
meet both targets. So that nobody's is bought with long prompts that starve, 90 % of the tenth
with the longest prompts must meet them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from coordinator.policy.balance import POLICIES
from measure.highest import PRECISION, highest
from measure.page import Row, Section, table
from measure.simulation.roofline import GPUS, MODELS
from measure.simulation.trace_run import Seen, Setup, Summary, Targets, met, simulate, summary
from measure.simulation.traces import Arrival, bimodal, faster, public, short, spread
from pdserve.types import Mode

SECTION = Section("comparison", "pdserve simulate compare FOLDER --write docs/simulation.md")

WORKERS = 4
SPLITS = {Mode.COLOCATED: (0,), Mode.DISAGGREGATED: (2, 3, 1), Mode.AUTO: (2, 0, 3, 1)}
"""Workers that only read, for others; the best one stands for the mode."""
ATTAINED = 0.9
LONGEST = 0.9
"""The quantile of prompts' lengths from which they are among the longest."""
MAIN = Targets(ttft_s=0.25, ttft_token_s=1e-4, tpot_s=0.0125, tpot_token_s=7.5e-8)
"""By one rule for all traffic, from what a request takes alone. The first token: DistServe's 0.25 s
for chats, and four times what it takes to read a prompt token. Those after it: half as much again,
of 8 ms and of what it takes to read the KV of each prompt token, 49 ns."""
OTHERS = (replace(MAIN, ttft_s=1.0, tpot_s=0.015), replace(MAIN, ttft_s=0.5, tpot_s=0.03))

_FLEET = Setup(Mode.COLOCATED, WORKERS, 0, MODELS["llama-3.1-8b"], GPUS["h100"])

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The same requests at any rate: `arrivals` from a folder of public traces, which are served
    faster or slower. `rate`, in requests a second, is where the search for goodput begins."""

    name: str
    arrivals: Callable[[Path], list[Arrival]]
    rate: float


def _first(number: int, pattern: str) -> Callable[[Path], list[Arrival]]:
    return lambda folder: public(folder, pattern)[:number]


_MOONCAKE = _first(120, "*conversation*.jsonl")
_TRAFFIC = (
    Traffic("Azure code", _first(300, "*code*.csv"), 5.5),
    Traffic("Azure chat", _first(700, "*conv*.csv"), 45.0),
    Traffic("Mooncake", _MOONCAKE, 1.0),
    Traffic("Mooncake, spread", lambda folder: spread(_MOONCAKE(folder), 3.0), 1.9),
    Traffic("bimodal", lambda _: bimodal(2000.0, 1.0, 1), 42.0),
    Traffic("bimodal, another seed", lambda _: bimodal(1000.0, 1.0, 2), 42.0),
    Traffic("all short", lambda _: short(1000.0, 1.0, 1), 170.0),
)
TRAFFIC = {traffic.name: traffic for traffic in _TRAFFIC}


def attained(seen: Seen, targets: Targets) -> tuple[float, float]:
    """The part that met both targets: of all requests, and of those with the longest prompts
    that were answered."""
    good = met(seen, targets)
    if not good.size:
        return 0.0, 0.0
    prompts = np.asarray(seen.prompt_tokens)
    longest = prompts >= np.quantile(prompts, LONGEST)
    return float(good.sum()) / seen.asked, float(good[longest].mean())


@dataclass(frozen=True, slots=True)
class Best:
    """A mode with the split that has the most goodput, in requests a second; `prefill` as in
    Setup."""

    mode: Mode
    prefill: int
    goodput: float

    @property
    def words(self) -> str:
        split = " (all do both)" if self.mode is Mode.AUTO else ""
        if self.prefill:
            split = f" ({self.prefill}:{WORKERS - self.prefill})"
        return f"{self.goodput:.3g}{split}"


class Bench:
    """One traffic, served at any rate, with these targets."""

    def __init__(self, traffic: Traffic, folder: Path, targets: Targets, report: Report) -> None:
        """Raises OSError or TraceError."""
        self.traffic = traffic
        self.targets = targets
        self._arrivals = traffic.arrivals(folder)
        self._own_rate = len(self._arrivals) / self._arrivals[-1].at_s
        self._report = report
        self._runs: dict[tuple[Mode, int, float], Seen] = {}

    def run(self, mode: Mode, prefill: int, rate: float) -> Seen:
        key = mode, prefill, rate
        if key not in self._runs:
            setup = replace(_FLEET, mode=mode, prefill=prefill, targets=self.targets)
            seen = simulate(faster(self._arrivals, rate / self._own_rate), setup)
            self._runs[key] = seen
            good, longest = attained(seen, self.targets)
            where = f"{self.traffic.name}, {mode}, {prefill} of {WORKERS} read"
            self._report(f"{where}, {rate:.3g}/s: {good:.0%} good, of the longest {longest:.0%}")
        return self._runs[key]

    def best(self, mode: Mode, start: float) -> Best:
        """By its goodput, looked for from a rate on; by those that are served well at the traffic's
        rate, where it has none. A split that is no better than one before is tried but once."""
        found = Best(mode, 0, 0.0)
        for prefill in SPLITS[mode]:

            def attains(rate: float, prefill: int = prefill) -> bool:
                return min(attained(self.run(mode, prefill, rate), self.targets)) >= ATTAINED

            better = found.goodput * PRECISION
            if not better or attains(better):
                rate = highest(attains, better or start)
                found = Best(mode, prefill, rate)
        if not found.goodput:
            good = {split: self.good(mode, split, self.traffic.rate) for split in SPLITS[mode]}
            found = Best(mode, max(good, key=good.__getitem__), 0.0)
        return found

    def good(self, mode: Mode, prefill: int, rate: float) -> float:
        """The part of all requests that is served well."""
        return attained(self.run(mode, prefill, rate), self.targets)[0]


@dataclass(frozen=True, slots=True)
class Result:
    """What the modes reach under one traffic: colocated, disaggregated, auto; and how they do at
    the goodput of the better fixed one."""

    traffic: str
    targets: Targets
    best: tuple[Best, ...]
    at_equal_rate: tuple[Seen, ...]

    @property
    def gain(self) -> str:
        """Auto's over the better fixed mode: of goodput, or where that has none, of requests that
        are served well at the same rate."""
        *fixed, auto = (best.goodput for best in self.best)
        if max(fixed):
            return f"{auto / max(fixed) - 1:+.0%}"
        *fixed, auto = (attained(seen, self.targets)[0] for seen in self.at_equal_rate)
        return f"{auto / max(fixed) - 1:+.0%} good ones"


def serve(bench: Bench) -> Result:
    colocated = bench.best(Mode.COLOCATED, bench.traffic.rate)
    split = bench.best(Mode.DISAGGREGATED, bench.traffic.rate)
    rate = max(colocated.goodput, split.goodput)
    best = colocated, split, bench.best(Mode.AUTO, rate or bench.traffic.rate)
    equal = tuple(bench.run(one.mode, one.prefill, rate or bench.traffic.rate) for one in best)
    return Result(bench.traffic.name, bench.targets, best, equal)


def compare(folder: Path, report: Report, processes: int) -> str:
    """The generated part of the page, by so many processes, in each of which `report` is called.

    Raises OSError or TraceError.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        results = [pool.submit(_serve, name, folder, MAIN, report) for name in TRAFFIC]
        others = [
            pool.submit(_serve, "bimodal, another seed", folder, targets, report)
            for targets in OTHERS
        ]
        policies = pool.submit(_policies, folder, report)
        return render(
            [result.result() for result in results],
            [result.result() for result in others],
            policies.result(),
        )


def _serve(name: str, folder: Path, targets: Targets, report: Report) -> Result:
    return serve(Bench(TRAFFIC[name], folder, targets, report))


def _policies(folder: Path, report: Report) -> str:
    """Balance policies on traffic whose prompts share prefixes."""
    arrivals = faster(_first(600, "*conversation*.jsonl")(folder), 2.4)
    rows: list[Row] = []
    for balance in POLICIES:
        report(f"Mooncake, {balance}")
        told = summary(
            simulate(arrivals, replace(_FLEET, workers=8, balance=balance, targets=MAIN)), MAIN
        )
        rows.append((balance, f"{told.hit_rate:.1%}", _times(told), f"{told.good:.0%}"))
    return table(("policy", "hits", "TTFT p50 / p90 / p99, ms", "good"), rows)


def modes_table(results: list[Result]) -> str:
    rows: list[Row] = [
        (
            result.traffic,
            _words(result.targets),
            *(best.words for best in result.best),
            result.gain,
        )
        for result in results
    ]
    header = ("", "targets", "colocated", "disaggregated (P:D)", "auto (P:D)", "auto's gain")
    return table(header, rows)


def latencies_table(results: list[Result]) -> str:
    rows: list[Row] = []
    for result in results:
        for best, seen in zip(result.best, result.at_equal_rate, strict=True):
            told = summary(seen, result.targets)
            good, longest = attained(seen, result.targets)
            rows.append(
                (
                    f"{result.traffic}, {best.mode}",
                    f"{good:.0%} / {longest:.0%}",
                    _times(told),
                    f"{told.itl_ms.p50:.1f} / {told.itl_ms.p90:.1f} / {told.itl_ms.p99:.1f}",
                    f"{told.modes.get('disaggregated', 0) / max(1, told.requests):.0%}",
                    f"{told.hit_rate:.0%}",
                )
            )
    header = (
        "", "good, of all / of the longest", "TTFT p50 / p90 / p99, ms", "ITL, ms",
        "disaggregated", "hits",
    )  # fmt: skip
    return table(header, rows)


def _words(targets: Targets) -> str:
    first = f"{targets.ttft_s:g} s + {targets.ttft_token_s * 1000:g} ms a token"
    after = f"{targets.tpot_s * 1000:g} ms + {targets.tpot_token_s * 1e9:g} ns"
    return f"{first}; {after}"


def _times(told: Summary) -> str:
    ttft = told.ttft_ms
    return f"{ttft.p50:,.0f} / {ttft.p90:,.0f} / {ttft.p99:,.0f}"


def render(results: list[Result], others: list[Result], policies: str) -> str:
    """The page's part."""
    return SECTION.render(
        [
            "Goodput, in requests a second, and the split of the workers that has it.",
            modes_table(results),
            "The bimodal mix under other targets.",
            modes_table(others),
            "The modes at the same rate, the goodput of the better fixed mode.",
            latencies_table(results),
            "Balance policies on Mooncake's first 600 requests, 2.4 times as fast: "
            "eight workers, colocated.",
            policies,
        ]
    )
