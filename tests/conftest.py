"""Settings of every test, and the one real fleet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.fleet import Fleet
from tests.support.running_system import RunningSystem

# No deadline: machines are shared, and a slow example is no wrong one.
settings.register_profile("pdserve", deadline=None, max_examples=50)
settings.load_profile("pdserve")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Real vLLM workers on CPU, NIXL between them, as `pdserve up` runs them; for all tests."""
    system = RunningSystem("--port", "0", "--grpc-port", "0")
    try:
        with Fleet(system, system.wait_for("ready")) as running:
            yield running
    finally:
        system.stop()
