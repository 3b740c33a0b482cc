"""What the ready workers of a model can take, summed up for admission."""

from __future__ import annotations

from coordinator.catalog import ServedModel
from coordinator.fleet import Fleet
from coordinator.policy.health import SERVING
from coordinator.policy.ticket import Capacity, Pool
from coordinator.worker import Worker
from pdserve.types import Mode, Role


def capacity(fleet: Fleet, model: ServedModel) -> Capacity:
    ready = [
        worker
        for worker in fleet.workers()
        if worker.state in SERVING
        and worker.info is not None
        and worker.info.model == model.config.name
    ]
    sequences = free_kv_tokens = 0
    for worker in ready:
        if worker.info is not None and worker.hosts(Role.DECODE):
            sequences += worker.info.max_sequences
            free_kv_tokens += round(worker.info.kv_capacity_tokens * (1 - worker.load.kv_usage))
    pools = {role: _pool(ready, role) for role in _readers(model)}
    return Capacity(
        sequences, free_kv_tokens, {role: pool for role, pool in pools.items() if pool.workers}
    )


def _readers(model: ServedModel) -> tuple[Role, ...]:
    """Who reads prompts of the model, as it is configured."""
    if not model.may_disaggregate:
        return (Role.DECODE,)
    only = {arm.mode for arm in model.policy.arms} or {model.policy.mode}
    if only == {Mode.DISAGGREGATED} and not model.config.mode_override:
        return (Role.PREFILL,)
    return (Role.PREFILL, Role.DECODE)


def _pool(ready: list[Worker], role: Role) -> Pool:
    chunks = [
        worker.info.chunk_tokens
        for worker in ready
        if worker.info is not None and worker.hosts(role)
    ]
    return Pool(len(chunks), sum(chunks))
