"""The state of a worker as a table: what is known of it, and what that makes it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.policy.health import SERVING, WorkerState, state_of
from coordinator.policy.pairs import PairState, Standing

READY = {
    "reached": True,
    "connected": True,
    "silent": False,
    "leaving": False,
    "standing": Standing(PairState.PROVEN),
    "waiting": 0,
}
LIVE = Standing(PairState.UNTRIED)
QUARANTINED = Standing(PairState.QUARANTINED)


@pytest.mark.parametrize(
    ("signs", "state"),
    [
        ({"reached": False, "connected": False, "standing": LIVE}, WorkerState.CONNECTING),
        ({"connected": False}, WorkerState.LOST),
        ({"standing": LIVE}, WorkerState.LIVE),
        ({}, WorkerState.READY),
        ({"waiting": 1}, WorkerState.LOADED),
        ({"standing": QUARANTINED}, WorkerState.QUARANTINED),
        ({"silent": True}, WorkerState.SILENT),
        ({"leaving": True}, WorkerState.DRAINING),
        # The first that holds.
        ({"connected": False, "leaving": True, "silent": True}, WorkerState.LOST),
        ({"silent": True, "leaving": True}, WorkerState.SILENT),
        ({"standing": QUARANTINED, "leaving": True}, WorkerState.DRAINING),
        ({"standing": QUARANTINED, "waiting": 1}, WorkerState.QUARANTINED),
        ({"standing": LIVE, "waiting": 1}, WorkerState.LIVE),
    ],
)
def test_the_state(signs: dict[str, Any], state: WorkerState) -> None:
    known: dict[str, Any] = READY | signs
    assert state_of(**known) is state


def test_work_is_given_to_what_is_ready_however_loaded() -> None:
    assert {WorkerState.READY, WorkerState.LOADED} == SERVING
