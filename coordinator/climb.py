"""One request's way through the fleet: plans carried out, down the ladder, until tokens come.

The same way is gone before the first token and, where a decode worker cuts an answer off,
after it: then with a request that holds what was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from coordinator.catalog import ServedModel
from coordinator.execution import Execution
from coordinator.fleet import Fleet
from coordinator.lifecycle import Event
from coordinator.observer import Observer
from coordinator.policy.choose import choose
from coordinator.policy.ladder import (
    Fault,
    Rung,
    avoiding,
    fault_of,
    is_infrastructure,
    rung,
    words,
)
from coordinator.policy.pairs import Pair
from coordinator.policy.prefix import PromptBlocks
from coordinator.policy.resume import Resumed, resumed
from coordinator.policy.snapshot import Plan, RequestFacts
from coordinator.record import RequestRecord
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError, RejectedError
from pdserve.types import Delta, EngineRequest, Route

log = structlog.get_logger("climb")

MAX_ATTEMPTS = 6
"""Plans tried in one go: two prefill workers by two transports each, and then what is left."""

LOOK_AGAIN_S = 1.0
"""A request without a worker looks at the fleet when there is news of it, and that often."""

Facts = Callable[[int, PromptBlocks], RequestFacts]
"""The facts of a prompt of so many tokens, with its blocks."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that failed where another may do.

    `waits` says that it was the loss of a decode worker, which another one, or the same, may
    make good in a moment.
    """

    plan: Plan
    fault: Fault
    error: PrefillError | DecodeError
    waits: bool


class Climb:
    """The attempts of one request, and what they have learned.

    `execution` is the one that runs, for the caller to release; what fails is released here.
    """

    execution: Execution

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        model: ServedModel,
        request: EngineRequest,
        facts: Facts,
        record: RequestRecord,
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._model = model
        self._request = request
        self._facts_of = facts
        self._record = record
        self._token_ids: tuple[int, ...] = ()
        self._num_chars = 0
        self._left = model.config.max_recoveries
        self._losses_left = max(1, model.config.max_recoveries)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as it was asked for, without what was answered since."""
        return self._request.token_ids

    async def begin(self, prompt: PromptBlocks) -> Delta:
        """Plans and tries, each time without what failed, until a first delta comes.

        `prompt` are the request's blocks.

        Raises PdserveError: the last failure, where one was met.
        """
        return await self._climb(Resumed(self._request), prompt, None)

    async def resume(self, error: DecodeError) -> Delta:
        """Goes on elsewhere with the answer that `error` cut off, after all that came of it.

        Raises PdserveError: `error` itself where it is not to be made good.
        """
        plan = self.execution.plan
        token_ids, num_chars = self.execution.given
        self._losses_left -= self.execution.lost
        self._token_ids += tuple(token_ids)
        self._num_chars += num_chars
        self.execution.release()
        fault = fault_of(plan, prefill_side=False, reason=error.reason)
        failed = is_infrastructure(error.reason)  # a move is no failure, and costs no attempt
        if fault is None:
            raise error
        if failed and not self._left:
            self._observer.metrics.recovered(self._record, error.reason.label, "failed")
            raise error
        if failed:
            self._left -= 1
            self._fleet.worker_failed(plan.decode, error.message)
        self._record.recoveries.append(error.reason.label)
        self._record.apply(Event.RECOVER)
        log.warning(
            "answer cut off",
            request_id=self._record.request_id,
            reason=error.reason.label,
            cause=error.message,
            decode_worker=plan.decode,
            tokens=len(self._token_ids),
        )
        again = resumed(
            self._request,
            self._token_ids,
            self._num_chars,
            is_whole=self._model.encoder.is_whole(self._token_ids),
        )
        asked = again.request
        prompt = PromptBlocks(asked.token_ids, asked.cache_salt, asked.lora)
        failure = _Failure(plan, Fault.DECODE, error, waits=True)
        metrics = self._observer.metrics
        try:
            first = await self._climb(again, prompt, failure)
        except PdserveError as refusal:
            metrics.recovered(self._record, error.reason.label, "failed")
            if refusal.reason.touched_no_worker:  # of what we ask for, not of what the client did
                raise error from refusal
            raise
        metrics.recovered(self._record, error.reason.label, "continued")
        return first

    async def _climb(self, what: Resumed, prompt: PromptBlocks, failure: _Failure | None) -> Delta:
        request, record = what.request, self._record
        facts = self._facts_of(len(request.token_ids), prompt)
        cut_off = failure
        if failure is not None:
            facts = avoiding(facts, failure.plan, failure.fault, failure.error.message)
        steps: list[str] = []
        for _ in range(MAX_ATTEMPTS):
            facts, plan = await self._plan(facts, failure)
            if failure is not None and failure is not cut_off:
                steps.append(self._step(failure, plan))
            elif plan.fell_back:
                self._count(Rung.COLOCATED, ErrorReason.NO_WORKER)
            cached = facts.cached_tokens.get(plan.prefill or plan.decode, 0)
            if cut_off is None:  # the client has been told of the first route
                record.route = Route(plan.mode, "; ".join((plan.reason, *steps)), plan.arm)
                record.predicted_cached_tokens = cached
            record.prefill_worker = plan.prefill or ""
            record.decode_worker = plan.decode
            record.apply(Event.PLAN if failure is None else Event.FALL_BACK)
            pair = self._fleet.pair(plan)
            execution = Execution(self._fleet, plan, request, prompt, cached, what.answered)
            try:
                first = await execution.begin(record)
            except (PrefillError, DecodeError) as error:
                failure = self._blame(execution, pair, error)
                execution.release()
                facts = avoiding(facts, plan, failure.fault, error.message)
                record.phase("failed_attempts")
            except BaseException:
                execution.release()
                raise
            else:
                self._fleet.request_passed(plan, pair)
                self.execution = execution
                return first
        assert failure is not None
        raise failure.error

    async def _plan(
        self, facts: RequestFacts, failure: _Failure | None
    ) -> tuple[RequestFacts, Plan]:
        """The next plan, and the facts that it rests on.

        Where the last decode worker was lost, waits for one. Raises RejectedError, or the
        failure, which tells the client more than "none is left".
        """
        name, policy = self._model.config.name, self._model.policy
        until = time.monotonic() + self._model.config.recovery_wait_s
        while True:
            try:
                return facts, choose(self._fleet.next_turn(name), policy, facts)
            except RejectedError as refusal:
                left = until - time.monotonic()
                if failure is None:
                    raise
                if not failure.waits or left <= 0:
                    raise failure.error from refusal
            await self._fleet.news(min(left, LOOK_AGAIN_S))
            # Whoever is ready then has been proven since, or is the only one that there is.
            facts = replace(facts, failed_decode=frozenset())

    def _blame(
        self, execution: Execution, pair: Pair | None, error: PrefillError | DecodeError
    ) -> _Failure:
        """Counts the failure against pair and worker. Raises it where no other way helps."""
        if (
            pair is not None
            and is_infrastructure(error.reason)
            and self._fleet.request_failed(pair, error.message)
        ):
            self._observer.metrics.quarantined(pair.transport)
        plan = execution.plan
        prefill_side = isinstance(error, PrefillError)
        fault = fault_of(plan, prefill_side=prefill_side, reason=error.reason)
        lost = fault is Fault.DECODE and execution.lost
        # A request that kills its workers must not meet them all.
        if fault is None or (lost and self._losses_left <= 0):
            execution.release()
            raise error
        self._losses_left -= lost
        if is_infrastructure(error.reason) and fault in (Fault.PREFILL, Fault.DECODE):
            blamed = plan.decode if fault is Fault.DECODE else plan.prefill
            assert blamed is not None
            self._fleet.worker_failed(blamed, error.message)
        return _Failure(plan, fault, error, lost)

    def _step(self, failure: _Failure, plan: Plan) -> str:
        """Counts and logs one step down the ladder, and puts it into words for the client."""
        step = rung(failure.plan, failure.fault, plan)
        self._count(step, failure.error.reason)
        log.warning(
            "fell back",
            request_id=self._record.request_id,
            step=step.value,
            reason=failure.error.reason.label,
            cause=failure.error.message,
            prefill_worker=failure.plan.prefill,
            decode_worker=failure.plan.decode,
            transport=failure.plan.transport or None,
        )
        return words(step, plan, failure.error.message)

    def _count(self, step: Rung, reason: ErrorReason) -> None:
        self._record.fallbacks.append(f"{step}: {reason.label}")
        self._observer.metrics.fell_back(self._record, step.value, reason.label)
