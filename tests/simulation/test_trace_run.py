"""Traffic through simulated fleets, against latencies worked out by hand."""

from __future__ import annotations

import pytest

from measure.simulation.roofline import GPUS, MODELS, Precision, Roofline
from measure.simulation.trace_run import Setup, Targets, simulate, summary
from measure.simulation.traces import Arrival, bimodal
from pdserve.engine.sim_timing import StepWork
from pdserve.types import Mode

MODEL, GPU = MODELS["llama-3.1-8b"], GPUS["h100"]
TIMING = Roofline(MODEL, GPU, Precision.BF16, 1)
READ_S = TIMING.step_s(StepWork(200, 200**2 // 2, 1, 200))


def setup(mode: Mode, workers: int = 2, prefill: int = 1) -> Setup:
    return Setup(mode, workers, prefill, MODEL, GPU)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    seen = simulate([Arrival(0.0, 200, 3)], setup(Mode.COLOCATED))
    assert list(seen.ttft_s) == pytest.approx([READ_S], abs=1e-6)
    step_s = TIMING.step_s(StepWork(writing=1, write_context=202))
    assert list(seen.tpot_s) == pytest.approx([step_s], rel=1e-3)
    assert seen.gaps.tolist() == [2] or seen.gaps.tolist() == [1, 1]


def test_a_hand_off_adds_its_transfer() -> None:
    seen = simulate([Arrival(0.0, 400, 3)], setup(Mode.DISAGGREGATED))
    assert seen.modes == {"disaggregated": 1}
    read_s = TIMING.step_s(StepWork(400, 400**2 // 2))
    write_s = TIMING.step_s(StepWork(writing=1, write_context=400))
    assert seen.ttft_s[0] == pytest.approx(read_s + TIMING.transfer_s(400) + write_s, abs=1e-6)


def test_in_auto_mode_without_pure_readers_all_do_both() -> None:
    """While nothing is learnt, a long prompt is read elsewhere, and a short one is not."""
    for tokens, mode in ((2_000, "disaggregated"), (200, "colocated")):
        seen = simulate([Arrival(0.0, tokens, 3)], setup(Mode.AUTO, prefill=0))
        assert seen.modes == {mode: 1}


def test_a_shared_prefix_is_read_once() -> None:
    arrivals = [Arrival(0.0, 1024, 2, (1, 2)), Arrival(1.0, 1024, 2, (1, 2))]
    seen = simulate(arrivals, setup(Mode.COLOCATED, workers=1, prefill=0))
    # All blocks of 32 tokens but the last one, which has the token to go on from.
    assert seen.hit_rate == pytest.approx(992 / 2048)


def test_tokens_made_together_are_all_counted() -> None:
    arrivals = [Arrival(0.1 * number, 200, 50) for number in range(20)]
    seen = simulate(arrivals, setup(Mode.COLOCATED))
    assert sum(seen.gaps) == 20 * 49
    assert len(seen.gaps) < 20 * 49 / 2


def test_a_run_repeats_itself() -> None:
    arrivals = bimodal(20, 10.0, 3)
    first, second = (simulate(arrivals, setup(Mode.AUTO, workers=4)) for _ in range(2))
    assert first.ttft_s == second.ttft_s
    assert first.gaps_s == second.gaps_s


def test_goodput_counts_what_met_both_targets() -> None:
    seen = simulate([Arrival(0.0, 400, 3), Arrival(5.0, 8000, 3)], setup(Mode.COLOCATED))
    told = summary(seen, Targets(ttft_s=0.1, tpot_s=1.0))
    assert (told.requests, told.failed, told.good) == (2, 0, 0.5)
    assert told.goodput == pytest.approx(1 / seen.duration_s)
    assert told.gpu_hours == pytest.approx(2 * seen.duration_s / 3600)
    assert summary(seen, Targets(ttft_s=1.0, tpot_s=0.001)).good == 0.0
    # 8,000 tokens take 0.2 s more in their products, and not 0.5 s more in all.
    assert summary(seen, Targets(0.1, 1.0, ttft_token_s=0.5 / 8000)).good == 1.0
    assert summary(seen, Targets(0.1, 1.0, ttft_token_s=0.1 / 8000)).good == 0.5
    assert summary(seen, Targets(1.0, 0.001, tpot_token_s=1.0)).good == 1.0
