"""The state of a worker as a table: what is known of it, and what that makes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.policy.health import SERVING, Signs, WorkerState, state_of
from coordinator.policy.pairs import PairState, Standing

UNTRIED = Standing()
PROVEN = Standing(PairState.PROVEN)
QUARANTINED = Standing(PairState.QUARANTINED)
AWAY = Signs(False, False, False, False, UNTRIED, 0)
LIVE = replace(AWAY, reached=True, connected=True)
READY = replace(LIVE, standing=PROVEN)


@pytest.mark.parametrize(
    ("signs", "state"),
    [
        (AWAY, WorkerState.CONNECTING),
        (replace(AWAY, reached=True), WorkerState.LOST),
        (LIVE, WorkerState.LIVE),
        (READY, WorkerState.READY),
        (replace(READY, waiting=1), WorkerState.LOADED),
        (replace(LIVE, standing=QUARANTINED), WorkerState.QUARANTINED),
        (replace(READY, silent=True), WorkerState.SILENT),
        (replace(READY, leaving=True), WorkerState.DRAINING),
        # The first that holds.
        (replace(READY, connected=False, leaving=True, silent=True), WorkerState.LOST),
        (replace(READY, silent=True, leaving=True), WorkerState.SILENT),
        (replace(LIVE, standing=QUARANTINED, leaving=True), WorkerState.DRAINING),
        (replace(LIVE, standing=QUARANTINED, waiting=1), WorkerState.QUARANTINED),
        (replace(LIVE, waiting=1), WorkerState.LIVE),
    ],
)
def test_the_state(signs: Signs, state: WorkerState) -> None:
    assert state_of(signs) is state


def test_work_is_given_to_what_is_ready_however_loaded() -> None:
    assert {WorkerState.READY, WorkerState.LOADED} == SERVING
