"""Where one request could go each way: the workers that the pools' balance policies take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from coordinator.policy.balance import POLICIES
from coordinator.policy.balance.pick import Need
from coordinator.policy.forecast import Forecast
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot, WorkerView
from pdserve.errors import ErrorReason, RejectedError

MAX_PREFILL_WORKERS = 2
"""Prefill workers tried for one request; a pool that is away must not use its attempts up."""


class Candidates:
    """The best of each route, found when it is asked for."""

    def __init__(self, snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts) -> None:
        """Raises RejectedError NO_WORKER where no decode worker is left."""
        self.policy = policy
        self.facts = facts
        self.forecast = Forecast(snapshot, policy, facts)
        self._snapshot = snapshot
        self._decodes = _without(snapshot.decode, facts.failed_decode)
        if not self._decodes:
            raise RejectedError(
                ErrorReason.NO_WORKER, "no decode worker is ready; retry later", retry_after_s=1
            )

    @property
    def turn(self) -> int:
        """The decision's number."""
        return self._snapshot.turn

    @cached_property
    def colocated(self) -> WorkerView:
        """The decode worker that reads the prompt itself."""
        pick = POLICIES[self.policy.decode_balance]
        need = Need(
            lambda view: self.forecast.colocated(view).cost,
            self.facts.cached_tokens,
            self._snapshot.turn,
        )
        return pick(self._decodes, need)

    @cached_property
    def pair(self) -> tuple[WorkerView, WorkerView] | None:
        """The prefill and the decode worker of a hand-off; None where no proven pair is left."""
        if len(self.facts.failed_prefill) >= MAX_PREFILL_WORKERS:
            return None
        prefills = _without(self._snapshot.prefill, self.facts.failed_prefill)
        decodes = _without(self._decodes, self.facts.full_decode)
        pick = POLICIES[self.policy.decode_balance]
        need = Need(self.forecast.taking_over, self.facts.cached_tokens, self._snapshot.turn)
        while prefills and decodes:
            decode = pick(decodes, need)
            if partners := self._partners(prefills, decode):
                return self._prefill(partners), decode
            decodes = [view for view in decodes if view is not decode]
        return None

    def _partners(self, prefills: list[WorkerView], decode: WorkerView) -> list[WorkerView]:
        pairs, name = self._snapshot.pairs, decode.worker_id
        return [view for view in prefills if (view.worker_id, name) in pairs]

    def _prefill(self, partners: list[WorkerView]) -> WorkerView:
        pick = POLICIES[self.policy.prefill_balance]
        return pick(
            partners,
            Need(self.forecast.handing_over, self.facts.cached_tokens, self._snapshot.turn),
        )


def _without(views: Sequence[WorkerView], ids: frozenset[str]) -> list[WorkerView]:
    return [view for view in views if view.worker_id not in ids] if ids else list(views)
