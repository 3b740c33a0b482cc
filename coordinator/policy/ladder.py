"""What a request does after a failure: the next rung of the ladder. Pure.

From the top: the next transport of the same pair, another prefill worker, colocated. What a
decode worker broke is tried on another one, at the same rung.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from coordinator.policy.snapshot import Plan, RequestFacts
from pdserve.errors import ErrorReason


class Fault(StrEnum):
    """What a failed attempt is blamed on, and the next one avoids."""

    TRANSPORT = "transport"
    PREFILL = "prefill"
    DECODE = "decode"
    ROOM = "room"


class Rung(StrEnum):
    """How an attempt differs from the one before."""

    TRANSPORT = "transport"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


_HOLDER = frozenset(
    {
        ErrorReason.KV_EXPIRED,
        ErrorReason.KV_REUSED,
        ErrorReason.KV_DIGEST_MISMATCH,
        ErrorReason.KV_INCOMPATIBLE,
        ErrorReason.KV_ALTERED,
        ErrorReason.KV_FOREIGN,
        ErrorReason.KV_STALE_EPOCH,
    }
)
"""Told by the decode side of a handle that the prefill worker should not have given."""


def fault_of(plan: Plan, *, prefill_side: bool, reason: ErrorReason) -> Fault | None:
    """Whom to blame for a failure that the prefill or the decode side told of.

    None where no other way would help: the request itself is at fault, or its time is over.
    """
    if not reason.value.retryable and reason is not ErrorReason.INTERNAL:
        return None
    if prefill_side or (plan.prefill is not None and reason in _HOLDER):
        return Fault.PREFILL
    if plan.prefill is not None and reason.concerns_kv:
        return Fault.TRANSPORT
    if plan.prefill is not None and reason is ErrorReason.NO_ROOM:
        return Fault.ROOM
    return Fault.DECODE


def is_busy(reason: ErrorReason) -> bool:
    """Whether a worker that is well takes nothing now."""
    return reason in (ErrorReason.NO_ROOM, ErrorReason.DRAINING)


def is_infrastructure(reason: ErrorReason) -> bool:
    """Whether a request failed for its workers' infrastructure: not for the
    client, its deadline, or a worker that is merely busy."""
    broke = reason.value.retryable or reason is ErrorReason.INTERNAL
    return broke and not is_busy(reason)


def avoiding(facts: RequestFacts, plan: Plan, fault: Fault, cause: str) -> RequestFacts:
    """The facts for the next decision, without what the failed plan is blamed on.

    `cause` is the failure in words, shown to the client.
    """
    before, tried = facts.stay, facts.tried_transports
    facts = replace(facts, failure=cause, stay=None, tried_transports=frozenset())
    if fault is Fault.DECODE:
        return replace(facts, failed_decode=facts.failed_decode | {plan.decode})
    if fault is Fault.ROOM:
        return replace(facts, full_decode=facts.full_decode | {plan.decode})
    assert plan.prefill is not None
    facts = replace(facts, failed_prefill=facts.failed_prefill | {plan.prefill})
    if fault is Fault.PREFILL:
        return facts
    # The worker may be well, and only this way from it broken.
    pair = (plan.prefill, plan.decode)
    tried = tried if before == pair else frozenset()
    return replace(facts, stay=pair, tried_transports=tried | {plan.transport})


def rung(failed: Plan, fault: Fault, plan: Plan) -> Rung:
    """The step from a failed plan to the next one."""
    if failed.prefill is not None and plan.prefill is None:
        return Rung.COLOCATED
    if fault in (Fault.DECODE, Fault.ROOM):
        return Rung.DECODE
    if (failed.prefill, failed.decode) == (plan.prefill, plan.decode):
        return Rung.TRANSPORT
    return Rung.PREFILL


def words(step: Rung, plan: Plan, cause: str) -> str:
    """The step as the client reads it; names no worker."""
    match step:
        case Rung.TRANSPORT:
            return f"tried again over {plan.transport}: {cause}"
        case Rung.COLOCATED:
            return f"fell back to colocated: {cause}"
        case _:
            return f"tried another {step} worker: {cause}"
