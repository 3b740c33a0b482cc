"""What must be true of a run, whatever befell it; each finding in words.

The numbers are those of the invariants in this project's design: 1 every request ends once,
2 its tokens are those of one undisturbed run, 3 nothing is held when all is idle, 4 it is
charged once for what it used, 5 what is over is stopped, 6 no failure hides behind a success.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.lifecycle import TERMINAL
from coordinator.record import RequestRecord
from measure.simulation.cluster import Cluster
from measure.simulation.fault_script import Ask
from measure.simulation.worker import SimWorker
from pdserve.engine.sim_model import Answer
from pdserve.errors import ErrorReason
from pdserve.types import Delta, FinishReason, Usage

_NEVER_TOLD = frozenset({ErrorReason.INTERNAL.label, ErrorReason.INVALID_ARGUMENT.label})
_UNDISTURBED = frozenset(
    # What a fleet in which nothing breaks may tell a client.
    reason.label
    for reason in (
        ErrorReason.QUEUE_FULL,
        ErrorReason.OVERLOADED,
        ErrorReason.DEADLINE_EXCEEDED,
        ErrorReason.NO_WORKER,
        ErrorReason.NO_ROOM,
    )
)


@dataclass(slots=True)
class Told:
    """What one client got: text and tokens in order, then an end, an error or neither."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    left: bool = False

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish = delta.finish_reason
        self.usage = delta.usage

    @property
    def words(self) -> str:
        return "left" if self.left else self.error or f"finished by {self.finish}"


def wrong_answer(
    request_id: str, ask: Ask, told: Told, record: RequestRecord, *, faultless: bool
) -> list[str]:
    """Invariants 1, 2, 4 and 6, of one request that is over."""
    found = []
    right_text, right_tokens, right_finish = right_answer(ask)
    if not record.done or record.state not in TERMINAL:
        found.append(f"invariant 1: {request_id} is over, but recorded as {record.state}")
    if told.token_ids != right_tokens[: len(told.token_ids)]:
        found.append(f"invariant 2: {request_id} got wrong tokens: {told.token_ids}")
    if not right_text.startswith(told.text):
        found.append(f"invariant 2: {request_id} got a wrong text: {told.text!r}")
    if told.error in _NEVER_TOLD:
        found.append(f"invariant 1: {request_id} was told {told.error}")
    if told.error and faultless and told.error not in _UNDISTURBED:
        found.append(f"invariant 1: nothing broke, and {request_id} was told {told.error}")
    if told.error or told.left:
        return found
    if (told.text, told.token_ids, told.finish) != (right_text, right_tokens, right_finish):
        found.append(f"invariant 6: {request_id} finished, and its answer is not whole")
    counts = told.usage and (told.usage.prompt_tokens, told.usage.completion_tokens)
    if counts != (len(ask.prompt), len(right_tokens)) or record.usage != told.usage:
        found.append(f"invariant 4: {request_id} is charged {record.usage}")
    return found


def right_answer(ask: Ask) -> tuple[str, list[int], FinishReason]:
    """The answer that nothing disturbs: text, tokens, why it ends."""
    assert ask.sampling.max_tokens is not None
    answer = Answer(tuple(map(ord, ask.prompt)), ask.sampling, ask.sampling.max_tokens)
    text, tokens = "", []
    while True:
        token, new, finish = answer.next()
        text += new
        tokens.append(token)
        if finish is not None:
            return text, tokens, finish


def not_stopped(request_id: str, name: str, worker: SimWorker) -> list[str]:
    """Invariant 5: a worker that could know of the end does nothing for the request."""
    if request_id not in worker.engine.request_ids:
        return []
    return [f"invariant 5: {name} still works for {request_id}"]


def not_idle(cluster: Cluster) -> list[str]:
    """Invariant 3, of the coordinator and of every worker."""
    found = []
    for admission in cluster.gateway.admissions.values():
        if (admission.running, admission.queued) != (0, 0):
            found.append(f"{admission.running} permits are taken, {admission.queued} wait")
    for entry in cluster.fleet.workers():
        held = entry.outstanding_sequences, entry.outstanding_tokens
        if held != (0, 0):
            found.append(f"the coordinator counts {held} outstanding")
    for name, worker in cluster.workers.items():
        held_by = {
            "sequences or leases": worker.workload.unfinished,
            "open leases": worker.workload.leases.open,
            "reserved tokens": worker.workload.load.reserved_tokens,
            "KV usage": worker.engine.load.kv_usage,
            "requests": len(worker.engine.request_ids),
        }
        found += [f"{name} holds {count} {what}" for what, count in held_by.items() if count]
    return [f"invariant 3: {what} though all is idle" for what in found]


def not_counted_once(cluster: Cluster, records: list[RequestRecord]) -> list[str]:
    """Invariant 1, as the metrics tell it."""
    counted = sum(
        sample.value
        for family in cluster.observer.metrics.registry.collect()
        if family.name == "pdserve_requests"
        for sample in family.samples
        if sample.name == "pdserve_requests_total"
    )
    if counted == len(records):
        return []
    return [f"invariant 1: {len(records)} requests were asked, {counted:.0f} counted"]
