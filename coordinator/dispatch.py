"""The only orchestrator: carries out plans, down the ladder, until a first token is there.

A failure before the first token thus still has its own status. From then on the
`ResponseStream` owns everything that the request holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from coordinator.catalog import ServedModel
from coordinator.execution import Execution
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller
from coordinator.lifecycle import Event
from coordinator.observer import Observer
from coordinator.policy.choose import choose
from coordinator.policy.prefix import chain
from coordinator.policy.snapshot import RequestFacts
from coordinator.record import RequestRecord, ended_by
from coordinator.response import ResponseStream
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError, RejectedError
from pdserve.types import ChatPrompt, Delta, EngineRequest, GenerateSpec, Route

MAX_ATTEMPTS = 4
"""Plans tried for one request before its first token."""

_HANDOFF_FAILURES = frozenset(
    {
        ErrorReason.KV_EXPIRED,
        ErrorReason.KV_REUSED,
        ErrorReason.KV_DIGEST_MISMATCH,
        ErrorReason.KV_INCOMPATIBLE,
        ErrorReason.KV_TRANSFER_FAILED,
    }
)
"""Told by the decode side, but the prefill worker's KV was at fault."""


class Dispatcher:
    """Takes requests from the façades. One for each coordinator."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        fleet: Fleet,
        gateway: Gateway,
        observer: Observer,
    ) -> None:
        self.models = models
        self._fleet = fleet
        self._gateway = gateway
        self._observer = observer

    async def open(
        self, spec: GenerateSpec, caller: Caller, record: RequestRecord
    ) -> ResponseStream:
        """Returns when the first delta is there; the caller must `aclose` what it gets.

        Raises PdserveError, and then the request has been released, counted and logged.
        """
        try:
            async with _until(spec.deadline):
                return await self._open(spec, caller, record)
        except PdserveError as error:
            self._end(record, error)
            raise
        except asyncio.CancelledError:
            self._end(record, PdserveError(ErrorReason.CANCELLED, "the client left"))
            raise
        except Exception:
            self._end(record, PdserveError(ErrorReason.INTERNAL, "internal error"))
            raise

    def _end(self, record: RequestRecord, error: PdserveError) -> None:
        record.apply(ended_by(error))
        self._observer.done(record, error)

    async def _open(
        self, spec: GenerateSpec, caller: Caller, record: RequestRecord
    ) -> ResponseStream:
        model = self.models.get(spec.model)
        if model is None:
            raise RejectedError(
                ErrorReason.MODEL_NOT_FOUND,
                f"the model {spec.model!r} is not served here; the model list names those that are",
                param="model",
            )
        record.model = spec.model
        permit = await self._gateway.enter(caller, spec.model, spec.deadline)
        try:
            record.phase("queue")
            token_ids = await model.encoder.encode_async(spec.prompt)
            record.prompt_tokens = len(token_ids)
            request = _engine_request(spec, token_ids, self._context_length(model))
            record.phase("tokenise")
            execution, first = await self._climb(spec, model, request, record)
        except BaseException:
            permit.release()
            raise
        stream = ResponseStream(execution, first, permit, record, self._observer)
        if spec.deadline is not None:
            stream.expire_at(spec.deadline)
        return stream

    async def _climb(
        self,
        spec: GenerateSpec,
        model: ServedModel,
        request: EngineRequest,
        record: RequestRecord,
    ) -> tuple[Execution, Delta]:
        """Plans and tries, each time without what failed, until a first delta comes."""
        prefix = chain(request.token_ids, request.cache_salt)
        facts = self._facts(spec, model, len(request.token_ids), prefix)
        failure: PdserveError | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                plan = choose(self._fleet.next_turn(spec.model), model.policy, facts)
            except RejectedError as refusal:
                # The worker's own failure tells the client more than "none is left".
                raise failure or refusal from None
            record.route = Route(plan.mode, plan.reason, plan.arm)
            record.prefill_worker = plan.prefill or ""
            record.decode_worker = plan.decode
            record.apply(Event.PLAN if failure is None else Event.FALL_BACK)
            execution = Execution(self._fleet, plan, request, prefix)
            try:
                return execution, await execution.begin(record)
            except (PrefillError, DecodeError) as error:
                execution.release()
                if not _may_work_elsewhere(error):
                    raise
                failure = error
                facts = _without(facts, execution, error)
                record.phase("failed_attempts")
                record.fallbacks.append(error.reason.label)
                self._observer.metrics.fell_back(spec.model, error.reason.label)
            except BaseException:
                execution.release()
                raise
        assert failure is not None
        raise failure

    def _context_length(self, model: ServedModel) -> int:
        served = self._fleet.context_length(model.config.name)
        return model.context_length if served is None else min(served, model.context_length)

    def _facts(
        self, spec: GenerateSpec, model: ServedModel, num_tokens: int, prefix: tuple[int, ...]
    ) -> RequestFacts:
        keys = {"request": spec.request_id, "session": spec.session, "tenant": spec.tenant}
        return RequestFacts(
            prompt_tokens=num_tokens,
            asked=spec.mode,
            # A request without a session or a tenant falls into an arm by itself.
            sticky_key=keys[model.policy.sticky] or spec.request_id,
            cached_tokens=self._fleet.cached_tokens(model.config.name, prefix),
        )


def _may_work_elsewhere(error: PdserveError) -> bool:
    """What a worker breaks over another may do; what it refuses for good, none will."""
    return error.reason.value.retryable or error.reason is ErrorReason.INTERNAL


def _without(
    facts: RequestFacts, execution: Execution, error: PrefillError | DecodeError
) -> RequestFacts:
    plan = execution.plan
    if plan.prefill is not None:
        if isinstance(error, PrefillError) or error.reason in _HANDOFF_FAILURES:
            return facts.without_prefill(plan.prefill, error.message)
        if error.reason is ErrorReason.NO_ROOM:
            return facts.without_room(plan.decode, error.message)
    return facts.without_decode(plan.decode, error.message)


def _engine_request(
    spec: GenerateSpec, token_ids: tuple[int, ...], context_length: int
) -> EngineRequest:
    """Resolves max_tokens. Raises RejectedError where prompt and answer do not fit."""
    param = "messages" if isinstance(spec.prompt, ChatPrompt) else "prompt"
    room = context_length - len(token_ids)
    wanted = spec.sampling.max_tokens
    if not token_ids:
        raise RejectedError(ErrorReason.INVALID_ARGUMENT, "the prompt is empty", param=param)
    if room < 1:
        raise RejectedError(
            ErrorReason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have "
            f"{context_length}; shorten the prompt",
            param=param,
        )
    if wanted is not None and wanted > room:
        raise RejectedError(
            ErrorReason.CONTEXT_LENGTH_EXCEEDED,
            f"max_tokens is {wanted} and the prompt has {len(token_ids)} tokens, but together "
            f"they may be {context_length}; ask for at most {room}",
            param="max_tokens",
        )
    return EngineRequest(
        request_id=spec.request_id,
        token_ids=token_ids,
        sampling=replace(spec.sampling, max_tokens=room if wanted is None else wanted),
        cache_salt=spec.cache_salt,
    )


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Raises DEADLINE_EXCEEDED at that time of `time.monotonic`; None never does."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise PdserveError(
            ErrorReason.DEADLINE_EXCEEDED, "the deadline passed before the first token"
        ) from None
