"""What is made of vLLM's statistics of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdserve.engine.base import EngineLoad, StepStats
from pdserve.engine.vllm_stats import StepRecorder
from pdserve.types import EngineWork


def details(**fields: Any) -> SimpleNamespace:
    nothing = {"num_ctx_tokens": 0, "num_generation_requests": 0, "is_dummy": False}
    return SimpleNamespace(**nothing | fields)


def step(iteration_details: SimpleNamespace | None, **fields: Any) -> SimpleNamespace:
    """As vLLM's `SchedulerStats`."""
    return SimpleNamespace(
        num_running_reqs=fields.get("running", 0),
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.5,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
        kv_connector_stats=None,
        iteration_details=iteration_details,
    )


def test_a_step_tells_what_it_did() -> None:
    heard: list[StepStats] = []
    recorder = StepRecorder(heard.append)
    recorder.record(step(details(num_ctx_tokens=256, elapsed_ms=500.0), running=1))
    recorder.read(300, 100)
    recorder.record(
        step(details(num_ctx_tokens=44, num_generation_requests=3, elapsed_ms=40.0), running=1)
    )
    assert [stats.work for stats in heard] == [
        EngineWork(1, 0.5, 256, 0, 0, 0.0),
        EngineWork(1, 0.04, 44, (300**2 - 100**2) // 2, 3, 0.5),
    ]


def test_steps_in_which_nothing_ran_are_not_passed_on() -> None:
    heard: list[StepStats] = []
    recorder = StepRecorder(heard.append)
    recorder.record(step(None))
    recorder.record(step(None))
    recorder.record(step(details(is_dummy=True, elapsed_ms=1.0)))
    assert heard == [StepStats(EngineLoad(kv_usage=0.5))]
