"""One real fleet for the whole session: vLLM workers on CPU, NIXL between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet
from tests.support.running_system import RunningSystem


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    system = RunningSystem("--port", "0", "--grpc-port", "0")
    try:
        with Fleet(system, system.wait_for("ready")) as running:
            yield running
    finally:
        system.stop()
