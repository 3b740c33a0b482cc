"""How near a plan comes to the simulation of the same fleets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from measure.highest import PRECISION, highest
from measure.page import Row, Section, table
from measure.plan.fleet import Saturation, Traffic, saturation
from measure.plan.sizing import best_split
from measure.plan.slo import Latencies, Slo
from measure.simulation.roofline import GPUS, MODELS, Precision
from measure.simulation.trace_run import Setup, Targets, simulate, summary
from measure.simulation.traces import public
from pdserve.types import Mode

SECTION = Section("planned and simulated", "python -m measure.plan FOLDER --write docs/plan.md")

_FLEET = Setup(Mode.COLOCATED, 1, 0, MODELS["llama-3.1-70b"], GPUS["h100"], Precision.FP8, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """The first `requests` of a public trace, on so many workers of `tensor_parallel` GPUs.
    `start` is where the search for the highest rate begins, in requests a second."""

    name: str
    pattern: str
    requests: int
    slo: Slo
    mode: Mode
    workers: int
    start: float
    tensor_parallel: int = 2


_BRISK = Slo(ttft_p99_s=2.0, itl_p99_s=0.05)
_SLACK = Slo(ttft_p99_s=30.0, itl_p99_s=0.1)
CASES = (
    Case("Azure code", "*code*.csv", 500, _BRISK, Mode.COLOCATED, 8, 11.0),
    Case("Azure code", "*code*.csv", 500, _BRISK, Mode.DISAGGREGATED, 10, 14.0),
    Case("Azure chat", "*conv*.csv", 500, _BRISK, Mode.COLOCATED, 3, 22.0),
    Case("Azure chat", "*conv*.csv", 500, _BRISK, Mode.DISAGGREGATED, 4, 27.0),
    Case("Mooncake", "*conversation*.jsonl", 500, _SLACK, Mode.COLOCATED, 2, 2.0, 4),
    Case("Mooncake", "*conversation*.jsonl", 500, _SLACK, Mode.DISAGGREGATED, 5, 1.5),
)


def render(folder: Path, processes: int) -> str:
    """The generated part of the page, by so many processes. Raises OSError or TraceError."""
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        rows = [pool.submit(_row, case, folder) for case in CASES]
        header = ("", "SLO", "workers", "planned", "simulated", "planned beside simulated")
        return SECTION.render([_words(), table(header, [row.result() for row in rows])])


def _words() -> str:
    return (
        "Llama-3.1-70B in FP8 on H100s: the highest rate at which the SLO holds, which is also "
        "what the model's targets are set to, by the plan and by a simulation of the whole fleet. "
        "The plan chooses the split of each number of workers. Rates are told apart by "
        f"{PRECISION - 1:.0%}; prompts are read beside answers {_FLEET.decode_chunk} tokens a step."
    )


def _row(case: Case, folder: Path) -> Row:
    traffic = Traffic(public(folder, case.pattern)[: case.requests])
    setup, planned = _planned(case, traffic)
    simulated = highest(_holds(traffic, setup, case.slo), planned.rate)
    workers = f"{setup.workers}"
    if setup.prefill:
        workers = f"{setup.prefill}:{setup.workers - setup.prefill}"
    return (
        f"{case.name}, {case.requests} requests",
        f"{case.slo.ttft_p99_s:g} s, {case.slo.itl_p99_s * 1000:g} ms",
        f"{workers}, TP {case.tensor_parallel}",
        f"{planned.rate:.3g}/s",
        f"{simulated:.3g}/s",
        f"{planned.rate / simulated - 1:+.0%}",
    )


def _planned(case: Case, traffic: Traffic) -> tuple[Setup, Saturation]:
    setup = replace(
        _FLEET,
        mode=case.mode,
        workers=case.workers,
        tensor_parallel=case.tensor_parallel,
        targets=Targets(case.slo.ttft_p99_s, case.slo.itl_p99_s),
    )
    if case.mode is Mode.DISAGGREGATED:
        return best_split(traffic, setup, case.slo, case.start)
    return setup, saturation(traffic, setup, case.slo, case.start)


def _holds(traffic: Traffic, setup: Setup, slo: Slo) -> Callable[[float], bool]:
    splits = setup.mode is Mode.DISAGGREGATED

    def holds(rate: float) -> bool:
        told = summary(simulate(traffic.at(rate), setup), setup.targets)
        colocated = told.modes.get(Mode.COLOCATED, 0) if splits else 0
        seen = Latencies(
            told.ttft_ms.p99 / 1000,
            told.itl_ms.p99 / 1000,
            told.hit_rate,
            without_room=colocated / told.requests,
            splits=splits,
        )
        return not told.failed and seen.broken(slo) is None

    return holds
