"""Fake workers by role, and what a coordinator thinks of their pairs."""

from __future__ import annotations

from typing import Any

from pdserve.types import Role
from tests.support.core import Core
from tests.support.fake_worker import FakeWorker


def prefill(worker_id: str = "p", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.PREFILL, **info)


def decode(worker_id: str = "d", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.DECODE, **info)


def verdicts(core: Core) -> dict[tuple[str, str], tuple[str, str]]:
    """(state, why) of each pair of ids."""
    standings = {pair: core.fleet.pairs[pair] for pair in core.fleet.pairs}
    return {
        (pair.prefill[0], pair.decode[0]): (standing.state.value, standing.detail)
        for pair, standing in standings.items()
    }


PROVEN = ("proven", "")
