"""Plans: queues, fleets, costs and levers, against figures worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import quantities
from cli.failure import CliError
from cli.main import app
from coordinator.policy.snapshot import ModelPolicy
from measure.plan.fleet import Saturation, Traffic, least_fleet, least_work_s, saturation, serve
from measure.plan.levers import levers
from measure.plan.price import Cost, cost
from measure.plan.replay import replay as replayed
from measure.plan.server import Pool
from measure.plan.sizing import (
    Asked,
    Fleet,
    Measured,
    Sizing,
    best_split,
    cheapest,
    replicas,
    size,
    size_measured,
)
from measure.plan.slo import Constraint, Latencies, Slo
from measure.simulation.roofline import GPUS, MODELS, Precision
from measure.simulation.trace_run import Setup
from measure.simulation.traces import Arrival, bimodal, short
from pdserve.engine.sim_timing import StepWork
from pdserve.types import Mode

H100 = GPUS["h100"]
SMALL = MODELS["llama-3.1-8b"]
SLO = Slo(ttft_p99_s=2.0, itl_p99_s=0.05)
run = CliRunner()


class Steady:
    """A prompt token takes 1 ms, and a step in which anybody writes 10 ms besides; a transfer
    takes half a second."""

    def step_s(self, work: StepWork) -> float:
        return work.read_tokens * 0.001 + (0.01 if work.writing else 0.0)

    def transfer_s(self, num_tokens: int) -> float:
        return 0.5


def replay(arrivals: list[Arrival], prefill: Pool | None, decode: Pool) -> Latencies:
    mode = Mode.COLOCATED if prefill is None else Mode.DISAGGREGATED
    # By hand, one knows where each goes.
    policy = ModelPolicy(
        mode, prefill_balance="least-outstanding", decode_balance="least-outstanding"
    )
    return replayed(arrivals, policy, prefill, decode)


def pool(workers: int = 1, chunk: int = 1_000, kv: int = 1_000_000) -> Pool:
    return Pool(workers, Steady(), chunk, kv)


def test_one_request_alone_takes_what_its_steps_take() -> None:
    seen = replay([Arrival(0.0, 2_000, 3)], None, pool())
    # A full chunk, and one at whose end the first token is written.
    assert seen.ttft_p99_s == pytest.approx(1.0 + 1.01)
    assert seen.itl_p99_s == pytest.approx(0.01)


def test_a_split_adds_the_transfer_and_a_step_of_the_writer() -> None:
    seen = replay([Arrival(0.0, 2_000, 3)], pool(), pool())
    assert seen.ttft_p99_s == pytest.approx(2.0 + 0.5 + 0.01)


def test_what_comes_faster_than_it_is_read_waits_ever_longer() -> None:
    # One a second, each of which takes two: the last of 101 begins 100 s late.
    arrivals = [Arrival(float(number), 1_990, 1) for number in range(101)]
    seen = replay(arrivals, None, pool(chunk=1_990))
    # The 99th percentile of 101 is the second largest; neighbours may change places in the queue.
    assert seen.ttft_p99_s == pytest.approx(2.0 + 99.0, abs=2.0)


def test_another_worker_halves_the_queue() -> None:
    arrivals = [Arrival(0.0, 1_990, 1) for _ in range(10)]
    assert replay(arrivals, None, pool(1, 1_990)).ttft_p99_s == pytest.approx(20.0, rel=0.01)
    assert replay(arrivals, None, pool(2, 1_990)).ttft_p99_s == pytest.approx(10.0, rel=0.01)


def test_a_prompt_that_is_read_beside_answers_holds_them_up() -> None:
    # 101 tokens: of the hundred gaps, those in which the other prompt was read take long.
    arrivals = [Arrival(0.0, 100, 101), Arrival(0.5, 4_000, 1)]
    seen = replay(arrivals, None, pool())
    assert seen.itl_p99_s == pytest.approx(1.01)


def test_who_finds_no_room_in_the_cache_waits_for_it() -> None:
    # 100 + 101 tokens fit once. The first is done after 0.11 s and 100 steps.
    arrivals = [Arrival(0.0, 100, 101), Arrival(0.0, 100, 101)]
    seen = replay(arrivals, None, pool(kv=300))
    assert seen.without_room == 0.5
    assert seen.ttft_p99_s == pytest.approx(0.11 + 1.0 + 0.11, rel=0.01)
    assert seen.broken(Slo(1.0, 1.0)) is Constraint.KV


def test_what_others_cannot_read_for_want_of_room_is_read_by_who_writes() -> None:
    # 100 + 101 tokens fit once. The second is read at once by the worker that writes, as soon as
    # there is room: 0.1 s, half a second of transfer and a hundred steps and one after the start.
    arrivals = [Arrival(0.0, 100, 101), Arrival(0.0, 100, 101)]
    seen = replay(arrivals, pool(), pool(kv=300))
    assert seen.without_room == 0.5
    assert seen.ttft_p99_s == pytest.approx(0.1 + 0.5 + 1.01 + 0.11, rel=0.01)


def test_a_shared_prefix_is_read_once() -> None:
    arrivals = [Arrival(0.0, 1_024, 2, (1, 2)), Arrival(9.0, 1_024, 2, (1, 2))]
    # All but the last token, which must be computed.
    assert replay(arrivals, None, pool()).hit_rate == pytest.approx(1_023 / 2_048)
    assert replay(arrivals, None, pool(kv=600)).hit_rate == pytest.approx(512 / 2_048)


def test_the_constraint_is_what_is_missed_by_more() -> None:
    def broken(ttft: float, itl: float, without_room: float, *, splits: bool) -> Constraint | None:
        return Latencies(ttft, itl, 0.0, without_room, splits).broken(SLO)

    assert broken(1.9, 0.049, 0.5, splits=False) is None
    assert broken(4.0, 0.060, 0.0, splits=False) is Constraint.TTFT
    assert broken(4.0, 0.110, 0.0, splits=False) is Constraint.ITL
    assert broken(4.0, 0.060, 0.5, splits=False) is Constraint.KV
    # Those would be read by who writes: this is no split any more.
    assert broken(1.9, 0.049, 0.5, splits=True) is Constraint.KV


@pytest.mark.parametrize(
    ("rate", "capacity", "headroom", "expected"),
    [
        (1_000, 50, 0.3, 26),
        (100, 10, 0.0, 10),
        (100, 10, 0.01, 11),
        (10, 1, 0.3, 13),  # 13.000000000000002 by machine
        (1, 50, 0.3, 1),
    ],
)
def test_replicas_for_a_rate(rate: float, capacity: float, headroom: float, expected: int) -> None:
    assert replicas(rate, capacity, headroom) == expected


def test_costs() -> None:
    # 30 dollars an hour for 3,600 requests of 1,000 tokens.
    assert cost(10, 3.0, 1.0, 1_000) == Cost(30.0, pytest.approx(30 / 3_600), pytest.approx(25 / 3))
    assert cost(10, 3.0, 1.0, None).million_tokens is None


def fleet(hour: float) -> Fleet:
    return Fleet(0, 1, 1, None, 1.0, None, Cost(hour, 0.0, None))


def test_the_cheaper_one_and_what_it_saves() -> None:
    both = Sizing({"colocated": fleet(30.0), "disaggregated": fleet(24.0)})
    assert both.cheapest == "disaggregated"
    assert both.margin == pytest.approx(0.2)
    assert Sizing({"colocated": fleet(3.0), "disaggregated": fleet(3.0)}).cheapest == "colocated"
    one = Sizing({"colocated": None, "disaggregated": fleet(24.0)})
    assert (one.cheapest, one.margin) == ("disaggregated", None)
    assert Sizing({"colocated": None}).cheapest is None


def test_what_was_measured_is_multiplied() -> None:
    measured = {
        "one": Measured(2.0, gpus=4, tokens=1_000),
        "two": Measured(5.0, gpus=4),
        "none": Measured(0.0),
    }
    sizing = size_measured(measured, 10.0, 0.3, 2.0)
    one, two = sizing.fleets["one"], sizing.fleets["two"]
    assert one is not None
    assert two is not None
    assert (one.decode, one.gpus, one.saturation, one.cost.hour) == (7, 28, 14.0, 56.0)
    assert (two.decode, two.cost.hour) == (3, 24.0)
    assert sizing.fleets["none"] is None
    assert sizing.cheapest == "two"


TRAFFIC = Traffic(bimodal(120.0, 1.0, 1))
COLOCATED = Setup(Mode.COLOCATED, 1, 0, SMALL, H100)
SPLIT = replace(COLOCATED, mode=Mode.DISAGGREGATED)


@pytest.mark.parametrize("setup", [COLOCATED, SPLIT])
def test_no_worker_of_the_least_fleet_can_be_spared(setup: Setup) -> None:
    found = least_fleet(TRAFFIC, 20.0, setup, SLO)
    assert found is not None
    assert serve(TRAFFIC, 20.0, found).broken(SLO) is None
    work_s = sum(least_work_s(TRAFFIC, setup))
    assert found.workers >= 20.0 * work_s
    smaller = replace(found, workers=found.workers - 1)
    if setup.mode is Mode.COLOCATED or smaller.workers > smaller.prefill:
        assert serve(TRAFFIC, 20.0, smaller).broken(SLO) is not None
    if found.prefill > 1:
        fewer = replace(smaller, prefill=found.prefill - 1)
        assert serve(TRAFFIC, 20.0, fewer).broken(SLO) is not None


def test_the_least_work_is_that_of_full_steps() -> None:
    # Prompts of one chunk each: a step of 512 tokens, and what 100 answer tokens read of the KV.
    traffic = Traffic([Arrival(float(number), 512, 100) for number in range(1, 10)])
    read_s, write_s = least_work_s(traffic, replace(COLOCATED, decode_chunk=512))
    products_s = 2 * 512 * SMALL.multiplied / (989e12 * 0.6)
    attention_s = 512**2 / 2 * SMALL.attention_flops / (989e12 * 0.6)
    assert read_s == pytest.approx(0.002 + products_s + attention_s)
    kv_bytes = 100 * (512 + 50) * SMALL.kv_bytes_per_token
    assert write_s == pytest.approx(kv_bytes / (3.35e12 * 0.8), rel=0.01)


def test_an_slo_that_no_number_of_workers_keeps() -> None:
    # 16,000 tokens take some 0.5 s to read, and a chunk between two tokens 15 ms.
    assert least_fleet(TRAFFIC, 5.0, COLOCATED, Slo(0.05, 0.05)) is None
    assert least_fleet(TRAFFIC, 5.0, SPLIT, Slo(0.05, 0.05)) is None


def test_saturation_is_where_the_slo_breaks() -> None:
    two = replace(COLOCATED, workers=2)
    found = saturation(TRAFFIC, two, SLO, 10.0)
    assert serve(TRAFFIC, found.rate, two).broken(SLO) is None
    assert serve(TRAFFIC, found.rate * 1.1, two).broken(SLO) is found.constraint
    # The whole trace would have come before a queue could be seen.
    brief = Traffic(TRAFFIC.arrivals[:20])
    assert saturation(brief, two, Slo(30.0, 1.0), 0.1) == Saturation(
        pytest.approx(1 / 3, rel=0.05), None
    )


def test_the_best_split_serves_most() -> None:
    split, found = best_split(TRAFFIC, replace(SPLIT, workers=3), SLO, 15.0)
    others = [
        saturation(TRAFFIC, replace(split, prefill=prefill), SLO, 15.0).rate
        for prefill in (1, 2)
        if prefill != split.prefill
    ]
    assert found.rate * 1.03 >= max(others)


def test_many_are_planned_as_cells() -> None:
    traffic = Traffic(short(120.0, 1.0, 1))
    # 100 a second and 30 % are four cells of 32.5.
    asked = Asked(SMALL, H100, 100.0, SLO, 3.0, (Precision.BF16,))
    planned = size(traffic, asked, lambda _: None).fleets["colocated"]
    cell = Asked(SMALL, H100, 32.5, SLO, 3.0, (Precision.BF16,), headroom=0.0)
    part = size(traffic, cell, lambda _: None).fleets["colocated"]
    assert planned is not None
    assert part is not None
    assert planned.decode == 4 * part.decode
    assert planned.saturation == pytest.approx(4 * part.saturation)


def test_a_rate_that_is_next_to_nothing_is_planned_as_soon_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request in a month: what one worker serves is told all the same, after few replays."""
    replays: list[float] = []

    def counted(traffic: Traffic, rate: float, setup: Setup) -> Latencies:
        replays.append(rate)
        return serve(traffic, rate, setup)

    monkeypatch.setattr("measure.plan.fleet.serve", counted)
    traffic = Traffic(short(120.0, 1.0, 1))
    usual = Asked(SMALL, H100, 5.0, SLO, 3.0, (Precision.BF16,))
    often = cheapest(traffic, usual, Mode.COLOCATED, lambda _: None)
    most = len(replays)
    rare = replace(usual, rate=1 / 2_592_000)
    seldom = cheapest(traffic, rare, Mode.COLOCATED, lambda _: None)
    assert often is not None
    assert seldom is not None
    assert seldom.decode == often.decode == 1
    assert seldom.saturation == pytest.approx(often.saturation, rel=0.05)
    assert len(replays) - most <= most + 10


def test_levers_are_told_with_their_effect() -> None:
    asked = Asked(MODELS["llama-3.1-70b"], H100, 2.0, SLO, 3.0, (Precision.BF16,))
    traffic = Traffic(bimodal(60.0, 1.0, 1))
    found = {it.name: it.fleet for it in levers(traffic, asked, Mode.COLOCATED, lambda _: None)}
    assert list(found) == [
        "smaller model: llama-3.1-8b",
        "weights in FP8",
        "SLO 2 times as loose",
        "50% of each prompt found in the prefix cache",
    ]
    now = size(traffic, asked, lambda _: None).fleets["colocated"]
    assert now is not None
    gpus = [it.gpus for it in found.values() if it is not None]
    assert all(number <= now.gpus for number in gpus)
    assert gpus[0] < now.gpus


def test_quantities_as_people_write_them() -> None:
    assert quantities.rate("50/s") == 50.0
    assert quantities.rate("1000/min") == pytest.approx(1_000 / 60)
    assert quantities.rate("3.6 / h") == pytest.approx(0.001)
    assert quantities.duration("50ms") == pytest.approx(0.05)
    assert quantities.duration("2s") == 2.0
    for wrong in ("50", "/s", "1.2.3/s", "0/s", "-1/s", "5/day", "nan/s", "9" * 400 + "/s"):
        with pytest.raises(CliError, match="is not a rate"):
            quantities.rate(wrong)
    with pytest.raises(CliError, match="is not a duration"):
        quantities.duration("2")


def test_the_command_answers_from_a_capacity() -> None:
    asked = ["plan", "--rate", "1000/min", "--capacity", "50/min", "--headroom", "0.3"]
    told = run.invoke(app, asked)
    assert told.exit_code == 0
    assert "replicas: 26 workers, 26 GPUs" in told.output
    assert "$3.00 an hour of a GPU (assumed)" in told.output
    assert "$4.00 an hour of a GPU\n" in run.invoke(app, [*asked, "--gpu-price", "4"]).output
    assert "replicas: 1 worker, 1 GPU\n" in run.invoke(app, [*asked, "--rate", "1/h"]).output
    document = json.loads(run.invoke(app, [*asked, "--json"]).output)
    assert document["fleets"]["replicas"]["decode"] == 26
    assert document["fleets"]["replicas"]["cost"]["hour"] == 78.0


def test_the_command_plans_both_ways_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{at:02d}.0000000,{500 + at},20" for at in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    asked = ["plan", "--trace", str(trace), "--model", "llama-3.1-8b", "--rate", "30/s"]
    told = run.invoke(app, [*asked, "--itl-p99", "100ms"])
    assert told.exit_code == 0, told.output
    assert "prefill :" in told.output
    document = json.loads(run.invoke(app, [*asked, "--budget", "1", "--json"]).output)
    assert document["cheapest"] == "colocated"
    assert document["rate"] == 30.0
    assert [it["name"] for it in document["levers"]]
    assert run.invoke(app, [*asked[:-2]]).exit_code == 0  # at its own rate


def test_what_the_command_cannot_plan_by_is_said() -> None:
    for asked, words in (
        (["--capacity", "5/s"], "--rate is needed"),
        (["--rate", "5/s"], "--trace says"),
        (["--rate", "5/s", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--rate", "5/s", "--trace", "short", "--capacity", "1/s"], "give one of"),
        (["--rate", "5/s", "--bench", "b.json", "--capacity", "1/s"], "give one of"),
    ):
        told = run.invoke(app, ["plan", *asked])
        assert told.exit_code == 1
        assert words in told.output


@pytest.mark.parametrize("flag", ["--headroom", "--gpu-price"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e300"])
def test_no_figure_is_beyond_reason(flag: str, value: str) -> None:
    told = run.invoke(app, ["plan", "--rate", "5/s", "--capacity", "1/s", flag, value])
    assert told.exit_code == 1
    assert f"Invalid value for '{flag}'" in told.output


@pytest.mark.parametrize("at_s", [[], [0.0], [3.0], [0.0, 0.0]])
def test_what_has_no_rate_is_no_traffic(at_s: list[float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short"):
        Traffic([Arrival(at, 100, 5) for at in at_s])
    csv = tmp_path / "t.csv"
    rows = [f"2026-11-30 12:00:{at:09.6f},100,5" for at in at_s]
    csv.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    told = CliRunner().invoke(app, ["ab", "simulate", str(csv)])
    assert told.exit_code == 1
    assert ("too short" if at_s else "holds no request") in told.stderr
