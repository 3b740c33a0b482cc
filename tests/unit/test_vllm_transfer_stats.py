"""What is made of what vLLM's connectors report with a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine import vllm_stats
from pdserve.engine.base import StepStats, Transfer
from pdserve.engine.vllm_stats import StepRecorder
from pdserve.errors import ErrorReason
from pdserve.types import LeaseEnd

CONNECTORS = ["PdGrpcConnector", "PdNixlConnector"]


def stats(connector: str, **payload: Any) -> Any:
    empty = {"bytes_transferred": [], "transfer_duration": []}
    return SimpleNamespace(
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.0,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
        kv_connector_stats={connector: empty | payload},
        iteration_details=None,
    )


@pytest.fixture
def steps() -> list[StepStats]:
    return []


@pytest.fixture
def recorder(steps: list[StepStats]) -> StepRecorder:
    return StepRecorder(steps.append)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_failure_is_told_once(recorder: StepRecorder, connector: str) -> None:
    recorder.record(stats(connector, failures=[("t", "KV_STALE_EPOCH", "restarted")]))
    assert recorder.take_failure("other") is None
    failure = recorder.take_failure("t")
    assert failure is not None
    assert (failure.reason, failure.message) == (ErrorReason.KV_STALE_EPOCH, "restarted")
    assert recorder.take_failure("t") is None


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (("fetched",), None),
        (("fetched", "fetched"), LeaseEnd.FETCHED),
        (("fetched", "expired"), LeaseEnd.EXPIRED),
        (("abandoned", "fetched"), LeaseEnd.ABANDONED),
        (("released", "abandoned"), LeaseEnd.RELEASED),
    ],
)
def test_a_hold_has_ended_once_it_has_in_every_worker(
    recorder: StepRecorder, connector: str, ends: tuple[str, ...], expected: LeaseEnd | None
) -> None:
    for end in ends:
        assert recorder.end_of("t", 2) is None
        recorder.record(stats(connector, ended=[("t", end), ("other", "lost")]))
    assert recorder.end_of("t", 2) is expected
    assert recorder.end_of("unknown", 2) is None


async def test_the_end_of_a_hold_can_be_waited_for(recorder: StepRecorder) -> None:
    waiting = asyncio.create_task(recorder.ended("t", 1))
    await asyncio.sleep(0)
    recorder.record(stats(CONNECTORS[0], ended=[("other", "fetched")]))
    await asyncio.sleep(0)
    assert not waiting.done()
    recorder.record(stats(CONNECTORS[0], ended=[("t", "fetched")]))
    assert await waiting is LeaseEnd.FETCHED


def test_what_nobody_asks_for_is_forgotten(
    recorder: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stats, "_MAX_TOLD", 2)
    for name in "abc":
        recorder.record(
            stats(CONNECTORS[0], ended=[(name, "fetched")], failures=[(name, "INTERNAL", "")])
        )
    assert [bool(recorder.end_of(name, 1)) for name in "abc"] == [False, True, True]
    assert recorder.take_failure("a") is None


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_transfer_took_as_long_as_in_its_slowest_worker(
    recorder: StepRecorder, connector: str
) -> None:
    for seconds in (0.25, 0.5, 0.125):
        recorder.record(stats(connector, fetched=[("t", seconds), ("other", 9.0)]))
    assert recorder.take_transfer_s("t") == 0.5
    assert recorder.take_transfer_s("t") == 0, "told once"


def test_transfers_are_told_with_their_step(recorder: StepRecorder, steps: list[StepStats]) -> None:
    recorder.record(stats("PdGrpcConnector", transfers=[(5, 0.5)]))
    recorder.record(stats("PdNixlConnector", bytes_transferred=[7], transfer_duration=[0.7]))
    assert [step.transfers for step in steps] == [
        (Transfer("grpc", 5, 0.5),),
        (Transfer("nixl", 7, 0.7),),
    ]
