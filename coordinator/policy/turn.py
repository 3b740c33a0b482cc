"""What a request would ask of the workers, were it its turn now. Pure."""

from __future__ import annotations

from coordinator.policy.choose import choose
from coordinator.policy.forecast import Forecast
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot
from coordinator.policy.ticket import Work
from pdserve.types import Role


def work_of(snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts, max_tokens: int) -> Work:
    """The pool that would read its prompt, and how long that would take.

    Raises RejectedError where nobody would: then there is nothing to wait for.
    """
    plan = choose(snapshot, policy, facts)
    route = Forecast(snapshot, policy, facts).of(plan, snapshot)
    behind_s = route.reading.behind_s
    return Work(
        facts.prompt_tokens,
        max_tokens,
        Role.DECODE if plan.prefill is None else Role.PREFILL,
        own_s=route.start_s - behind_s,
        behind_s=behind_s,
    )
