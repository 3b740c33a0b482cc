"""What the ready workers of a model can take, summed up for admission."""

from __future__ import annotations

from coordinator.catalog import ServedModel
from coordinator.fleet import Fleet
from coordinator.policy.ticket import Capacity, Pool
from coordinator.worker import Worker
from pdserve.types import Mode, Role


def capacity(fleet: Fleet, model: ServedModel) -> Capacity:
    serving = fleet.serving(model.config.name)
    sequences = free_kv_tokens = 0
    for worker in serving:
        if worker.info is not None and worker.writes:
            sequences += worker.info.max_sequences
            free_kv_tokens += round(worker.info.kv_capacity_tokens * (1 - worker.load.kv_usage))
    pools = {
        Role.PREFILL: _pool([worker for worker in serving if worker.reads]),
        Role.DECODE: _pool([worker for worker in serving if worker.writes]),
    }
    readers = _readers(model)
    return Capacity(
        sequences,
        free_kv_tokens,
        {role: pool for role, pool in pools.items() if role in readers and pool.workers},
    )


def _readers(model: ServedModel) -> tuple[Role, ...]:
    """Who reads prompts of the model, as it is configured."""
    if not model.may_disaggregate:
        return (Role.DECODE,)
    only = {arm.mode for arm in model.policy.arms} or {model.policy.mode}
    if only == {Mode.DISAGGREGATED} and not model.config.mode_override:
        return (Role.PREFILL,)
    return (Role.PREFILL, Role.DECODE)


def _pool(workers: list[Worker]) -> Pool:
    chunks = [worker.info.chunk_tokens for worker in workers if worker.info is not None]
    return Pool(len(chunks), sum(chunks))
