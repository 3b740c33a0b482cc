"""Experiments on simulated fleets."""

from __future__ import annotations

from dataclasses import replace

from measure.ab.simulated import play
from measure.simulation.roofline import GPUS, MODELS
from measure.simulation.trace_run import Setup, Targets
from measure.simulation.traces import Arrival
from pdserve.ab.report import compare
from pdserve.types import Mode

# Two a second, of which every fourth is long.
TRAFFIC = [
    Arrival(at_s / 2, 8_000 if at_s % 4 == 0 else 100, 8 if at_s % 4 == 0 else 200)
    for at_s in range(60)
]
COLOCATED = Setup(
    Mode.COLOCATED, 2, 0, MODELS["llama-3.1-8b"], GPUS["h100"], targets=Targets(1.0, 0.02)
)


def test_equal_fleets_are_served_alike_in_every_slot() -> None:
    seen = play("t", TRAFFIC, {"a": COLOCATED, "b": COLOCATED}, 10.0, 2.0, lambda _: None)
    # Of 30 s, but for what the last request leaves; 16 requests in the 8 s of a slot that count.
    assert [(slot.block, slot.arm, slot.asked) for slot in seen.slots] == [
        (block, arm, 16) for block in (0, 1) for arm in "ab"
    ]
    [found] = compare(seen, 2.0)
    assert found.verdict == "not yet known, and no difference in sight"
    assert all(row.first == row.other for row in found.rows)


def test_each_fleet_is_served_the_same_traffic_and_seen_by_itself() -> None:
    """Half as many workers, on which chats wait for long prompts."""
    arms = {"two": COLOCATED, "one": replace(COLOCATED, workers=1)}
    [found] = compare(play("t", TRAFFIC, arms, 10.0, 2.0, lambda _: None), 2.0)
    assert (found.first.gpus, found.other.gpus) == (2, 1)
    rows = {row.name: row for row in found.rows}
    assert rows["TTFT p90"].first is not None and rows["TTFT p90"].other is not None
    assert rows["TTFT p90"].other > rows["TTFT p90"].first
