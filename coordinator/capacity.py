"""What the ready workers of a model can take, summed up for admission."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.catalog import ServedModel
from coordinator.fleet import Fleet
from coordinator.policy.readers import pool_of
from coordinator.policy.ticket import Capacity, Pool
from pdserve.types import Mode, Role

FRESH_S = 0.05
"""What was summed up serves for so long: workers report less often, and there may be hundreds."""


class FleetCapacity:
    """Of one model; `now` is a monotonic clock, in seconds."""

    def __init__(self, fleet: Fleet, model: ServedModel, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._model = model
        self._now = now
        self._known = Capacity()
        self._stale_at = now()

    def __call__(self) -> Capacity:
        now = self._now()
        if now >= self._stale_at:
            self._known = self._sum_up()
            self._stale_at = now + FRESH_S
        return self._known

    def _sum_up(self) -> Capacity:
        name = self._model.config.name
        serving = self._fleet.serving(name)
        estimates = self._fleet.estimators[name].estimates
        writers = [worker for worker in serving if worker.writes]
        sequences = free_kv_tokens = 0
        for worker in writers:
            assert worker.info is not None
            sequences += worker.info.max_sequences
            free_kv_tokens += round(worker.info.kv_capacity_tokens * (1 - worker.load.kv_usage))
        pools: dict[Role, Pool] = {}
        for role in _readers(self._model):
            readers = writers if role is Role.DECODE else [w for w in serving if w.reads]
            if readers:
                pools[role] = pool_of([worker.view for worker in readers], estimates)
        return Capacity(sequences, free_kv_tokens, pools)


def _readers(model: ServedModel) -> tuple[Role, ...]:
    """Who reads prompts of the model, as it is configured."""
    if not model.may_disaggregate:
        return (Role.DECODE,)
    only = {arm.mode for arm in model.arms} or {model.policy.mode}
    if only == {Mode.DISAGGREGATED} and not model.config.mode_override:
        return (Role.PREFILL,)
    return (Role.PREFILL, Role.DECODE)
