"""Copies of requests, whose answers nobody reads."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from coordinator.catalog import ServedModel
from coordinator.climb import Climb, Facts
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.observer import Observer
from coordinator.policy.prefix import PromptBlocks
from coordinator.record import SHADOW, RequestRecord, ended_by
from coordinator.response import ResponseStream
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import EngineRequest


class _NoPermit:
    """Copies hold no place in the queue of their model, and wait in none."""

    def release(self, answer_tokens: int | None = None) -> None: ...


class Shadow:
    """Serves copies. `observer` must not be one that charges for them."""

    def __init__(self, fleet: Fleet, experiments: Experiments, observer: Observer) -> None:
        self._fleet = fleet
        self._experiments = experiments
        self._observer = observer
        self._tasks: set[asyncio.Task[None]] = set()

    def copy(
        self,
        model: ServedModel,
        request: EngineRequest,
        facts: Facts,
        prompt: PromptBlocks,
        record: RequestRecord,
    ) -> None:
        """Serves a request that is about to be served once more, where its model's experiment
        wants that; returns at once."""
        name = f"{request.request_id}-shadow"
        twin = replace(
            record.twin(name, counts_prompt=True),
            surface=SHADOW,
            received=time.monotonic(),
            tally=None,
            gaps=None,
        )
        other = self._experiments.copy(model, twin)
        if other is None:
            return
        climb = Climb(
            self._fleet, self._observer, other, replace(request, request_id=name), facts, twin
        )
        task = asyncio.create_task(self._serve(climb, prompt, twin, model.config.name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, climb: Climb, prompt: PromptBlocks, record: RequestRecord, model: str
    ) -> None:
        error = PdserveError(ErrorReason.CANCELLED, "the coordinator ends")
        try:
            first = await climb.begin(prompt)
            stream = ResponseStream(
                climb, first, _NoPermit(), record, self._observer, lambda _: None
            )
            try:
                async for _ in stream:
                    pass
            finally:
                await stream.aclose()
        except PdserveError as failure:
            error = failure
        finally:
            self._experiments.copy_ended(model)
            if not record.done:
                record.apply(ended_by(error))
                self._observer.done(record, error)
