"""The decision: a snapshot and a request in, a Plan out. Pure.

Decode is picked first, for every request needs it; then whether, and where, the prompt
should be read elsewhere.
"""

from __future__ import annotations

from coordinator.policy.experiment import assign
from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot, WorkerView
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Fallback, Mode

MAX_PREFILL_WORKERS = 2
"""Prefill workers tried for one request; a pool that is away must not use its attempts up."""


def choose(snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts) -> Plan:
    """The way this request goes now; called again when a worker failed it.

    Raises RejectedError NO_WORKER when no ready worker can take it, or when it may not fall
    back to the decode worker.
    """
    mode, arm, reason = _wanted(policy, facts)
    decodes = [view for view in snapshot.decode if view.worker_id not in facts.failed_decode]
    if not decodes:
        raise RejectedError(
            ErrorReason.NO_WORKER, "no decode worker is ready; retry later", retry_after_s=1
        )
    if mode is Mode.AUTO:
        mode, reason = _by_length(policy, facts, _lightest(decodes, snapshot.turn), reason)
    if mode is Mode.COLOCATED:
        decode = _lightest(decodes, snapshot.turn)
        return Plan(None, decode.worker_id, arm, reason)
    return _disaggregated(snapshot, policy, facts, arm, reason)


def _wanted(policy: ModelPolicy, facts: RequestFacts) -> tuple[Mode, str, str]:
    """(mode, arm, reason): the request's own wish, then its arm, then the model's setting."""
    if facts.asked is not None:
        return facts.asked, "", f"{facts.asked}: asked for by the request"
    if policy.arms:
        arm = assign(policy.experiment, policy.arms, facts.sticky_key)
        return arm.mode, arm.name, f"{arm.mode}: experiment {policy.experiment}, arm {arm.name}"
    return policy.mode, "", f"{policy.mode}: set for the model"


def _by_length(
    policy: ModelPolicy, facts: RequestFacts, decode: WorkerView, reason: str
) -> tuple[Mode, str]:
    uncached = facts.prompt_tokens - facts.cached_tokens.get(decode.worker_id, 0)
    split = uncached >= policy.min_prefill_tokens
    sign = ">=" if split else "<"
    words = f"{reason}; {uncached} uncached prompt tokens {sign} {policy.min_prefill_tokens}"
    return (Mode.DISAGGREGATED if split else Mode.COLOCATED), words


def _disaggregated(
    snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts, arm: str, reason: str
) -> Plan:
    if facts.stay is not None and (transport := _next_transport(snapshot, facts, facts.stay)):
        return Plan(*facts.stay, arm, reason, transport)
    pairs = [
        (prefill, decode)
        for prefill in snapshot.prefill
        for decode in snapshot.decode
        if (prefill.worker_id, decode.worker_id) in snapshot.pairs
        and prefill.worker_id not in facts.failed_prefill
        and decode.worker_id not in facts.failed_decode | facts.full_decode
    ]
    if pairs and len(facts.failed_prefill) < MAX_PREFILL_WORKERS:
        decode = _lightest([decode for _, decode in pairs], snapshot.turn)
        prefill = _lightest([p for p, d in pairs if d is decode], snapshot.turn)
        best = snapshot.pairs[prefill.worker_id, decode.worker_id][0]
        return Plan(prefill.worker_id, decode.worker_id, arm, reason, best)
    why = facts.failure or _no_pair(policy)
    if policy.fallback is Fallback.FAIL:
        raise RejectedError(
            ErrorReason.NO_WORKER,
            f"disaggregated serving is not possible ({why}) and falling back is switched off",
            retry_after_s=1,
        )
    decodes = [view for view in snapshot.decode if view.worker_id not in facts.failed_decode]
    decode = _lightest(decodes, snapshot.turn)
    if facts.failure:  # whoever steps down the ladder says so
        return Plan(None, decode.worker_id, arm, reason)
    reason = f"{reason}; fell back to colocated: {why}"
    return Plan(None, decode.worker_id, arm, reason, fell_back=True)


def _no_pair(policy: ModelPolicy) -> str:
    if policy.transport is None:
        return "no proven pair of prefill and decode workers is ready"
    return f"no pair of prefill and decode workers proven over {policy.transport} is ready"


def _next_transport(snapshot: Snapshot, facts: RequestFacts, pair: tuple[str, str]) -> str:
    """The best transport of the pair that the request has not tried; empty when none is left,
    or one of the workers is not ready any more."""
    prefill, decode = pair
    ready = any(view.worker_id == prefill for view in snapshot.prefill) and any(
        view.worker_id == decode for view in snapshot.decode
    )
    transports = snapshot.pairs.get(pair, ()) if ready else ()
    return next((name for name in transports if name not in facts.tried_transports), "")


def _lightest(views: list[WorkerView], turn: int) -> WorkerView:
    """The worker with the least outstanding work; among equals they take turns."""
    count = len(views)
    return min(
        enumerate(views),
        key=lambda item: (
            item[1].outstanding_tokens,
            item[1].outstanding_sequences,
            (item[0] - turn) % count,
        ),
    )[1]
