"""Several choices of one request: a sequence each, read as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.facade.echo import Echo, echoed
from coordinator.facade.intake import Intake, ended_early
from coordinator.facade.validate import ParamNames
from coordinator.gateway.keys import Caller
from coordinator.record import RequestRecord
from pdserve.types import Delta, GenerateSpec, Prompt, Route, Usage

_AHEAD = 4
"""Deltas of each choice that may wait for a slow client."""


@dataclass(frozen=True, slots=True)
class Part:
    """One choice. Of the choices of one prompt only the first counts the prompt."""

    spec: GenerateSpec
    record: RequestRecord
    echo: Echo | None = None


def parts_of(
    spec: GenerateSpec, record: RequestRecord, prompts: Sequence[Prompt], n: int
) -> list[Part]:
    """`n` choices of each prompt, in order; each has a seed of its own, as in vLLM."""
    parts = []
    for index, (prompt, choice) in enumerate((p, c) for p in prompts for c in range(n)):
        request_id = f"{spec.request_id}-{index}" if index else spec.request_id
        sampling = spec.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + choice)
        part = replace(spec, request_id=request_id, prompt=prompt, sampling=sampling)
        own = record.twin(request_id, counts_prompt=choice == 0) if index else record
        parts.append(Part(part, own))
    return parts


def total(parts: Sequence[Part], usages: Sequence[Usage]) -> Usage:
    """What all choices used together."""
    counted = [u for part, u in zip(parts, usages, strict=True) if part.record.counts_prompt]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in counted),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in counted),
        reasoning_tokens=_sum([usage.reasoning_tokens for usage in usages]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """None where nothing was counted."""
    counted = [count for count in counts if count is not None]
    return sum(counted) if counted else None


_Read = tuple[int, Delta, Route, tuple[int, ...]]
"""Index of the choice, what came, the way it went, its prompt."""


class Several:
    """Iterates over (index of the choice, delta) until each has had its last delta.

    The first failure of any is raised, and ends all. The caller must `aclose`.
    """

    def __init__(self, intake: Intake, caller: Caller, names: ParamNames) -> None:
        self._intake = intake
        self._caller = caller
        self._names = names
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[_Read | Exception] = asyncio.Queue()
        self._first: tuple[int, Delta] | None = None
        self._left = 0
        self.prompt_token_ids: dict[int, tuple[int, ...]] = {}
        self.route: Route

    async def open(self, parts: Sequence[Part]) -> None:
        """Returns with the first delta of any choice there. Raises PdserveError."""
        self._queue = asyncio.Queue(maxsize=_AHEAD * len(parts))
        self._left = len(parts)
        self._tasks = [
            asyncio.create_task(self._read(index, part)) for index, part in enumerate(parts)
        ]
        self._first = await self._next()

    def __aiter__(self) -> Several:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if self._first is not None:
            first, self._first = self._first, None
        elif self._left:
            first = await self._next()
        else:
            raise StopAsyncIteration
        if first[1].finish_reason is not None:
            self._left -= 1
        return first

    async def aclose(self) -> None:
        """Ends what still runs; idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> tuple[int, Delta]:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        index, delta, self.route, self.prompt_token_ids[index] = item
        return index, delta

    async def _read(self, index: int, part: Part) -> None:
        try:
            stream = echoed(
                await self._intake.open(part.spec, self._caller, part.record, self._names),
                part.echo,
            )
            try:
                async for delta in stream:
                    await self._queue.put((index, delta, stream.route, stream.prompt_token_ids))
                    if delta.finish_reason is not None:
                        return
                raise ended_early()
            finally:
                await stream.aclose()
        except Exception as error:
            await self._queue.put(self._intake.failed(part.record, error))
        except BaseException as error:
            self._intake.failed(part.record, error)
            raise
