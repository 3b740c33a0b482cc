"""A worker of a simulated fleet whose engine a test holds still."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdserve.config import SimConfig
from pdserve.engine.sim import SimEngine
from pdserve.types import Role
from tests.support.gates import GatedClock, GatedEngine
from tests.support.sim_fleet import FAST, SimFleetWorker


class GatedWorker(SimFleetWorker):
    """All gates are open until a test closes them; `routes` are as for GatedEngine."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        *,
        sim: SimConfig = FAST,
        port: int = 0,
        routes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(worker_id, role, sim=sim, port=port)
        self._routes = routes

    @property
    def gates(self) -> GatedClock:
        return self.engine.gates

    def stop_after(self, steps: int) -> None:
        """The engine takes so many steps more, and then stands still."""
        self.gates.steps.close()
        self.gates.steps.allow(steps)

    def _make_engine(self, sim: SimConfig) -> SimEngine:
        self.engine = GatedEngine(sim, "sim-test", self._routes)
        return self.engine
