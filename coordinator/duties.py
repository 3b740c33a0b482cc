"""Moves elastic workers between the pools, as the policy says."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from coordinator.fleet import Fleet
from coordinator.policy.duty import DutyPolicy, OnDuty, move
from coordinator.worker import Worker
from pdserve.config import CoordinatorConfig
from pdserve.types import Role

log = structlog.get_logger("duties")

LOOK_S = 1.0


class Duties:
    """Looks at the pools of each elastic model, until cancelled.

    A move takes no work away: it says who is in which pool for the next decisions.
    """

    def __init__(self, fleet: Fleet, policies: Mapping[str, DutyPolicy]) -> None:
        """`policies` by model; those that are not in it are not elastic."""
        self._fleet = fleet
        self._policies = policies
        self._last_move = dict.fromkeys(policies, float("-inf"))

    async def run(self) -> None:
        while self._policies:
            for model, policy in self._policies.items():
                self._look(model, policy)
            await self._fleet.clock.sleep(LOOK_S)

    def _look(self, model: str, policy: DutyPolicy) -> None:
        workers = [_on_duty(worker) for worker in self._fleet.serving(model)]
        now = self._fleet.clock.now()
        step = move(workers, policy, self._last_move[model], now)
        if step is None:
            return
        worker = self._fleet.by_id(step.worker_id)
        assert worker is not None
        log.info(
            "worker moved",
            worker=step.worker_id,
            before=worker.duty.value,
            now=step.duty.value,
            reason=step.reason,
        )
        worker.duty = step.duty
        self._last_move[model] = now


def elastic_models(config: CoordinatorConfig) -> dict[str, DutyPolicy]:
    """By model name; those that are not elastic are left out."""
    return {
        model.name: DutyPolicy(**model.elastic.model_dump())
        for model in config.models
        if model.elastic is not None
    }


def _on_duty(worker: Worker) -> OnDuty:
    return OnDuty(
        worker_id=worker.process[0],
        duty=worker.duty,
        may_move=worker.hosts(Role.PREFILL) and worker.hosts(Role.DECODE),
        tokens=worker.outstanding_tokens,
        sequences=worker.writing,
    )
