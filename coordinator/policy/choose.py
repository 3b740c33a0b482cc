"""The decision: a snapshot and a request in, a Plan out. Pure.

Whose word counts for the mode, which workers each route would take, which route is better,
and what becomes of a request that cannot go the way it should.
"""

from __future__ import annotations

from coordinator.policy.candidates import Candidates
from coordinator.policy.decide import decide
from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Fallback, Mode


def choose(snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts) -> Plan:
    """The way this request goes now; called again when a worker failed it.

    Raises RejectedError NO_WORKER when no ready worker can take it, or when it may not fall
    back to the decode worker.
    """
    mode, arm, reason = _wanted(policy, facts)
    candidates = Candidates(snapshot, policy, facts)
    if mode is not Mode.COLOCATED and (plan := _same_pair(snapshot, facts, arm, reason)):
        return plan
    mode, why = decide(mode, candidates)
    reason = f"{reason}; {why}" if why else reason
    if mode is Mode.COLOCATED:
        return Plan(None, candidates.colocated.worker_id, arm, reason)
    if candidates.pair is not None:
        prefill, decode = (view.worker_id for view in candidates.pair)
        return Plan(prefill, decode, arm, reason, snapshot.pairs[prefill, decode][0])
    return _without_pair(candidates, arm, reason)


def _wanted(policy: ModelPolicy, facts: RequestFacts) -> tuple[Mode, str, str]:
    """(mode, arm, reason): what the request needs, then its own wish, its arm, the model's
    setting."""
    if facts.colocated_because:
        return Mode.COLOCATED, "", f"{Mode.COLOCATED}: {facts.colocated_because}"
    if facts.asked is not None:
        return facts.asked, "", f"{facts.asked}: asked for by the request"
    if policy.arm:
        why = f"experiment {policy.experiment}, arm {policy.arm}"
        return policy.mode, policy.arm, f"{policy.mode}: {why}"
    return policy.mode, "", f"{policy.mode}: set for the model"


def _without_pair(candidates: Candidates, arm: str, reason: str) -> Plan:
    policy, failure = candidates.policy, candidates.facts.failure
    why = failure or _no_pair(policy)
    if policy.fallback is Fallback.FAIL:
        raise RejectedError(
            ErrorReason.NO_WORKER,
            f"disaggregated serving is not possible ({why}) and falling back is switched off",
            retry_after_s=1,
        )
    decode = candidates.colocated.worker_id
    if failure:  # whoever steps down the ladder says so
        return Plan(None, decode, arm, reason)
    reason = f"{reason}; fell back to colocated: {why}"
    return Plan(None, decode, arm, reason, fell_back=True)


def _no_pair(policy: ModelPolicy) -> str:
    if policy.transport is None:
        return "no proven pair of prefill and decode workers is ready"
    return f"no pair of prefill and decode workers proven over {policy.transport} is ready"


def _same_pair(snapshot: Snapshot, facts: RequestFacts, arm: str, reason: str) -> Plan | None:
    """The plan for the pair that comes first, by its best transport that the request has not
    tried; None when none is left, or one of the workers is not ready any more."""
    if facts.stay is None:
        return None
    prefill, decode = facts.stay
    ready = any(view.worker_id == prefill for view in snapshot.prefill) and any(
        view.worker_id == decode for view in snapshot.decode
    )
    for name in snapshot.pairs.get(facts.stay, ()) if ready else ():
        if name not in facts.tried_transports:
            return Plan(prefill, decode, arm, reason, name)
    return None
