"""What must be true during and after each case, whatever happened; each finding in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.errors import ErrorReason
from tests.faults.client import ANSWERED, BROKEN, Client, Question, Told
from tests.faults.fleet import FaultFleet, State, Worker
from tests.faults.scenarios import Outcome
from tests.support.patience import happens

TOLD_S = 1.0
"""How long a worker may go on with what is over, once that is known."""

SILENCE_S = 3.5
READER_SILENCE_S = HOLDER_SILENCE_S
"""How long it may take to know of silence: three seconds to a coordinator as it is configured
here, which looks now and then, and longer to a reader of blocks."""

HOLDINGS = "running", "waiting", "unfinished", "reserved", "leases"

_LABELS = {
    Outcome.DEADLINE: ErrorReason.DEADLINE_EXCEEDED.label,
    Outcome.BROKEN: BROKEN,
}
_DETOURS = "tried another", "fell back", "next transport"


def wrong_answer(question: Question, expected: Outcome, told: Told) -> list[str]:
    """Invariants 1, 2 and 6: the one right end, with the one right status."""
    who = f"{question.request_id} over {question.surface}"
    if expected.is_answer:
        if told.how != ANSWERED:
            return [f"{who}: not answered, but told {told.how} ({told.status})"]
        found = []
        if told.text != question.right_text:
            found.append(f"{who}: a wrong text: {told.text!r}")
        detour = any(words in told.reason for words in _DETOURS)
        wrong = (Outcome.UNNOTICED, True), (Outcome.CONTINUED, True), (Outcome.DETOUR, False)
        if (expected, detour) in wrong:
            found.append(f"{who}: expected {expected.name}, but: {told.reason}")
        return found
    label = _LABELS[expected]
    if told.how != label:
        return [f"{who}: told {told.how} ({told.status}), not {label}"]
    found = []
    if not question.right_text.startswith(told.text):
        found.append(f"{who}: a wrong beginning: {told.text!r}")
    if (status := _right_status(question, label, told)) != told.status:
        found.append(f"{who}: {label} came with status {told.status}, not {status}")
    return found


def _right_status(question: Question, label: str, told: Told) -> str:
    if label == BROKEN:
        return told.status
    traits = ErrorReason[label.upper()].value
    if question.surface.startswith("grpc"):
        return traits.grpc
    # After the first token, and only then, the status is out.
    return "200" if told.text else str(traits.http)


def wrong_counts(before: Counter[str], after: Counter[str], ends: Iterable[set[str]]) -> list[str]:
    """Invariant 1: each request was counted once, by one of the outcomes that it may have."""
    counted = after - before
    left = Counter(counted)
    for may_be in ends:
        outcome = next((name for name in sorted(may_be) if left[name] > 0), None)
        if outcome is None:
            return [f"counted {dict(counted)}, but one request ended as {sorted(may_be)}"]
        left[outcome] -= 1
    return [f"counted too often: {dict(+left)}"] if +left else []


async def not_as_before(
    workers: Iterable[Worker], before: dict[str, State], within_s: float
) -> list[str]:
    """Invariant 5: nothing of what is over is held any more by a worker."""
    found: list[str] = []

    async def as_before() -> bool:
        found.clear()
        for worker in workers:
            state = await worker.do("state")
            then = before[worker.worker_id]
            found.extend(
                f"{worker.worker_id}: {name} is {state[name]}, and was {then[name]}"
                for name in HOLDINGS
                if state[name] != then[name]
            )
        return not found

    await happens(as_before, within_s)
    return found


async def not_told(worker: Worker, request_id: str, at_event: State, within_s: float) -> list[str]:
    """Invariant 5: an attempt that is over is over on the worker too, though another one may
    have begun there."""
    attempt = at_event["requests"].get(request_id)

    async def told() -> bool:
        state = await worker.do("state")
        open_before = state["leases"] - (state["leases_begun"] - at_event["leases_begun"])
        return open_before <= 0 and (
            attempt is None
            or state["requests"].get(request_id, attempt)["serial"] != attempt["serial"]
            or request_id not in state["requests"]
        )

    if await happens(told, within_s):
        return []
    return [f"{worker.worker_id}: still at work for {request_id}, or holds its blocks"]


async def not_tried_again(
    workers: Iterable[Worker], client: Client, at_event: dict[str, State], within_s: float
) -> list[str]:
    """Invariant 5, the other way round: what failed is known, for another attempt has begun."""
    request_id = client.question.request_id

    async def has_begun() -> bool:
        if client.done:
            return True
        for worker in workers:
            call = (await worker.do("state"))["requests"].get(request_id)
            before = at_event[worker.worker_id]["requests"].get(request_id)
            if call is not None and (before is None or call["serial"] != before["serial"]):
                return True
        return False

    if await happens(has_begun, within_s):
        return []
    return [f"{request_id}: no other attempt within {within_s:g} s"]


async def not_idle(fleet: FaultFleet, workers: Iterable[Worker], within_s: float) -> list[str]:
    """Invariant 3: nothing is held by the coordinator or by one of these workers."""
    found: list[str] = []

    async def idle() -> bool:
        found.clear()
        for model, admission in fleet.core.gateway.admissions.items():
            if (admission.running, admission.queued) != (0, 0):
                found.append(f"{model}: {admission.running} run, {admission.queued} wait")
        for entry in fleet.core.fleet.workers():
            held = entry.outstanding_sequences, entry.outstanding_tokens
            if held != (0, 0):
                found.append(f"the coordinator counts {held} outstanding")
        for worker in workers:
            state = await worker.do("state")
            found.extend(
                f"{worker.worker_id}: {name} is {state[name]}"
                for name in (*HOLDINGS, "kv_usage")
                if state[name]
            )
        return not found

    await happens(idle, within_s)
    return found
