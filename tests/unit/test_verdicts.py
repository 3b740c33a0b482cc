"""What the dashboard tells of experiments."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from coordinator import verdicts
from coordinator.verdicts import Verdicts
from pdserve.ab.report import Comparison, decide
from pdserve.ab.slots import Experiment


def report(blocks: int, **fields: Any) -> dict[str, Any]:
    """Of 100 requests a block, of each arm, 50 were good in the first and 90 in the other."""
    return {
        "name": "e",
        "model": "m",
        "assignment": "interleaved",
        "seed": 1,
        "arms": [
            {"name": name, "mode": mode, "gpus": 2, "weight": 1.0, "stopped": "", "hour": 0.0}
            for name, mode in (("a", "colocated"), ("b", "disaggregated"))
        ],
        "slots": [
            {
                "block": block, "arm": arm, "asked": 100, "good": good, "good_tokens": good,
                "seconds": 50.0, "ttft_s": None, "itl_s": None,
            }
            for block in range(blocks)
            for arm, good in (("a", 50), ("b", 90))
        ],
        **fields,
    }  # fmt: skip


async def test_the_interval_closes_in_and_brings_a_verdict() -> None:
    shown = Verdicts()
    widths = []
    for blocks in (0, 3, 12):
        [told] = await shown.of(report(blocks))
        low, middle, high = told["goodput"]
        assert low <= middle <= high
        widths.append((low, high))
        assert (told["first"], told["other"]) == ("a", "b")
        assert (told["blocks"], told["requests"]) == (blocks, 200 * blocks)
    assert widths[0] == (-1, float("inf"))
    assert widths[0][0] <= widths[1][0] < widths[2][0]
    assert told["verdict"] == "disaggregate"
    assert middle == pytest.approx(0.8)  # nine for each five


async def test_a_slot_is_worked_out_once_and_not_where_tokens_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def counted(experiment: Experiment) -> list[Comparison]:
        threads.append(threading.current_thread())
        return decide(experiment)

    monkeypatch.setattr(verdicts, "decide", counted)
    shown = Verdicts()
    for blocks, seed, times in ((3, 1, 1), (3, 1, 1), (4, 1, 2), (4, 2, 3)):
        await shown.of(report(blocks, seed=seed))
        assert len(threads) == times
    stopped = report(4, seed=2)
    stopped["arms"][1]["stopped"] = "b met its targets in 3 of its last 100 requests"
    [told] = await shown.of(stopped)
    assert "stopped: b met its targets" in told["verdict"]
    assert threading.main_thread() not in threads
