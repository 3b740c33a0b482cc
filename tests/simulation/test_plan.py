"""What a plan predicts, against the simulation: the real coordinator and workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from measure.plan.fleet import Traffic, saturation
from measure.plan.slo import Slo
from measure.simulation.roofline import GPUS, MODELS, Precision
from measure.simulation.trace_run import Setup, Targets, simulate, summary
from measure.simulation.traces import bimodal
from pdserve.types import Mode

SLO = Slo(ttft_p99_s=2.0, itl_p99_s=0.06)
TRAFFIC = Traffic(bimodal(300.0, 1.0, 1))
FLEET = Setup(
    Mode.COLOCATED,
    2,
    0,
    MODELS["llama-3.1-70b"],
    GPUS["h100"],
    Precision.FP8,
    2,
    targets=Targets(SLO.ttft_p99_s, SLO.itl_p99_s),
)


def holds(setup: Setup, rate: float) -> bool:
    told = summary(simulate(TRAFFIC.at(rate), setup), setup.targets)
    assert not told.failed
    return told.ttft_ms.p99 <= SLO.ttft_p99_s * 1000 and told.itl_ms.p99 <= SLO.itl_p99_s * 1000


@pytest.mark.parametrize(
    "setup", [FLEET, replace(FLEET, mode=Mode.DISAGGREGATED, workers=3, prefill=2)]
)
def test_the_simulation_saturates_within_15_percent_of_the_plan(setup: Setup) -> None:
    planned = saturation(TRAFFIC, setup, SLO, 8.0).rate
    assert holds(setup, planned / 1.15)
    assert not holds(setup, planned / 0.85)
