"""Takes requests in: a place, token ids, and plans carried out until a first token is there.

A failure before the first token thus still has its own status. From then on the
`ResponseStream` owns everything that the request holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from coordinator.catalog import ServedModel
from coordinator.climb import Climb
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller
from coordinator.observer import Observer
from coordinator.policy.prefix import PromptBlocks
from coordinator.policy.snapshot import RequestFacts
from coordinator.policy.turn import work_of
from coordinator.record import RequestRecord, ended_by
from coordinator.response import ResponseStream
from coordinator.shadow import Shadow
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.types import (
    WHOLE_CONTEXT,
    ChatPrompt,
    EngineRequest,
    GenerateSpec,
    SamplingParams,
    Truncation,
)


class Dispatcher:
    """Takes requests from the façades. One for each coordinator."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        fleet: Fleet,
        gateway: Gateway,
        observer: Observer,
        experiments: Experiments,
        *,
        traces: bool = False,
    ) -> None:
        """`traces` says that workers are to be told which trace a request is in."""
        self.models = models
        self._traces = traces
        self._fleet = fleet
        self._gateway = gateway
        self._observer = observer
        self._experiments = experiments
        # Told to experiments alone: nobody pays for a copy.
        self._shadow = Shadow(fleet, experiments, Observer(observer.metrics, [experiments]))

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
        record.model = spec.lora or spec.model
        if spec.arm:
            model = self._experiments.asked(model, spec)
        elif spec.mode is None and not _colocated_because(spec.sampling):
            model = self._experiments.join(model, spec, record)
        permit = await self._gateway.enter(caller, spec)
        try:
            context_length = self._context_length(model)
            truncation = _truncation(spec, context_length)
            token_ids = await model.encoder.encode_async(spec.prompt, truncation)
            record.prompt_tokens = len(token_ids)
            request = _engine_request(spec, token_ids, context_length, model.defaults.max_tokens)
            if self._traces and record.place is not None:
                request = replace(request, traceparent=record.place.traceparent)
            record.phase("tokenise")
            prompt = PromptBlocks(request.token_ids, request.cache_salt, request.lora)
            facts = partial(self._facts, spec, model)
            now = facts(len(token_ids), prompt)
            now = replace(now, queue_s=permit.waits_s(len(token_ids)))
            longest = request.sampling.max_tokens
            assert longest is not None
            snapshot = self._fleet.snapshot(spec.model)
            await permit.admit(work_of(snapshot, model.policy, now, longest))
            record.phase("queue")
            if not spec.arm:
                self._shadow.copy(model, request, facts, prompt, record)
            climb = Climb(self._fleet, self._observer, model, request, facts, record)
            first = await climb.begin(prompt)
            permit.read()
        except BaseException:
            permit.release()
            raise
        estimator = self._fleet.estimators[spec.model]
        stream = ResponseStream(
            climb, first, permit, record, self._observer, estimator.observe_answer
        )
        if spec.deadline is not None:
            stream.expire_at(spec.deadline)
        return stream

    def _context_length(self, model: ServedModel) -> int:
        served = self._fleet.context_length(model.config.name)
        return model.context_length if served is None else min(served, model.context_length)

    def _facts(
        self, spec: GenerateSpec, model: ServedModel, num_tokens: int, prompt: PromptBlocks
    ) -> RequestFacts:
        """Of a prompt of so many tokens, with its blocks."""
        return RequestFacts(
            prompt_tokens=num_tokens,
            asked=spec.mode,
            colocated_because=_colocated_because(spec.sampling),
            cached_tokens=self._fleet.cached_tokens(model.config.name, prompt),
        )


def _colocated_because(sampling: SamplingParams) -> str:
    if sampling.prompt_logprobs is not None:
        return "log probabilities of a prompt are read where it is answered"
    return ""


def _truncation(spec: GenerateSpec, context_length: int) -> Truncation | None:
    """With the number of tokens that is meant: there is to be room for an answer."""
    asked = spec.truncation
    if asked is None or asked.tokens != WHOLE_CONTEXT:
        return asked
    return replace(asked, tokens=context_length - 1)


def _engine_request(
    spec: GenerateSpec, token_ids: tuple[int, ...], context_length: int, longest: int | None
) -> EngineRequest:
    """Resolves max_tokens, to `longest` at most where none is asked for. Raises RejectedError
    where prompt and answer do not fit."""
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
    if wanted is not None and spec.truncation is not None:
        # As in vLLM: a prompt that is cut to fit may leave less.
        wanted = min(wanted, room)
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
        sampling=replace(spec.sampling, max_tokens=wanted or min(room, longest or room)),
        cache_salt=spec.cache_salt,
        lora=spec.lora,
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
