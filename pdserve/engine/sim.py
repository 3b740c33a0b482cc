"""A simulated engine: real scheduling of invented tokens, timed by a clock, no GPU.

A step reads at most `chunk_tokens` of prompts and writes one token for each running
sequence. KV is counted in tokens: a sequence holds its prompt from admission on and one
token more at each step; one that waits is admitted, in order of arrival, when its prompt
fits, and only then is KV fetched for it. Where the cache overflows, the last one admitted
waits again, as in vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from pdserve import prefix
from pdserve.cached_blocks import CachedBlocks
from pdserve.clock import Clock
from pdserve.config import SimConfig
from pdserve.engine import sim_holder
from pdserve.engine.base import (
    Admitted,
    EngineInfo,
    EngineLoad,
    Prefilled,
    StepListener,
    StepStats,
    Transfer,
)
from pdserve.engine.replayed import Replayed
from pdserve.engine.sim_model import (
    BLOCK_SIZE,
    Answer,
    AnswerSource,
    PrefixCache,
    logprobs_at,
    refuse_unknown,
)
from pdserve.engine.sim_sequence import SimSequence
from pdserve.engine.sim_sockets import RealSockets, Sockets
from pdserve.engine.sim_step import Step
from pdserve.engine.sim_timing import LinearTiming, StepWork, Timing
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import (
    Delta,
    EngineRequest,
    EngineWork,
    Fingerprint,
    FirstTokenTimings,
    GrpcDescriptor,
    KvDescriptor,
    LeaseEnd,
    NixlDescriptor,
    SimDescriptor,
)


class SimEngine:
    """An Engine that needs nothing. `revision` stands for the model in its fingerprint."""

    def __init__(  # noqa: PLR0913  (what tests and simulations put in its place)
        self,
        config: SimConfig,
        revision: str,
        clock: Clock,
        timing: Timing | None = None,
        sockets: Sockets | None = None,
        answer: Callable[[EngineRequest, int], AnswerSource] | None = None,
        *,
        adapters: tuple[str, ...] = (),
    ) -> None:
        """Steps take what the configuration says, unless `timing` is given; KV is fetched over
        the machine's own sockets, unless others are. `answer` makes an answer of at most so
        many tokens; where it tells its length beforehand, steps in which nothing begins or
        ends are taken together, by the event loop's own time."""
        self._config = config
        self._clock = clock
        self._timing = timing or LinearTiming(config)
        self._sockets = sockets or RealSockets()
        self._answer = answer or _answer
        self._info = EngineInfo(
            kind="sim",
            fingerprint=Fingerprint(
                revision, "sim", BLOCK_SIZE, "sim", adapters=",".join(sorted(adapters))
            ),
            context_length=config.context_length,
            kv_capacity_tokens=config.kv_capacity_tokens,
            transports=tuple(
                name
                for name in (NixlDescriptor.transport, GrpcDescriptor.transport)
                if config.transport in ("auto", name)
            ),
            weights=config.weights,
            chunk_tokens=config.chunk_tokens,
            max_sequences=config.max_num_seqs,
            adapters=adapters,
        )
        self._wake = asyncio.Event()
        self._cache = PrefixCache(config.kv_capacity_tokens)
        self._waiting: deque[SimSequence] = deque()
        self._running: list[SimSequence] = []
        self._held = sim_holder.SimHolder(clock, self._sockets, config.side_channel, self._wake.set)
        self._used_tokens = 0
        self._fetching = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._transfers: list[Transfer] = []
        self._dead: str | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self, listener: StepListener) -> None:
        await self._held.start()
        self._loop = asyncio.create_task(self._run(listener), name="sim engine")

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def load(self) -> EngineLoad:
        used = self._used_tokens + self._held.num_tokens
        return EngineLoad(
            running=len(self._running) - self._fetching,
            waiting=len(self._waiting) + self._fetching,
            kv_usage=used / self._config.kv_capacity_tokens,
        )

    @property
    def request_ids(self) -> list[str]:
        """Of all that it works for, or has waiting."""
        return [sequence.request.request_id for sequence in (*self._running, *self._waiting)]

    @property
    def cached(self) -> CachedBlocks:
        return self._cache.told

    async def generate(
        self, request: EngineRequest, kv: KvDescriptor | None
    ) -> AsyncIterator[Delta]:
        refuse_unknown(request.sampling)
        most = self._config.context_length - len(request.token_ids)
        answer = self._answer(request, min(request.sampling.max_tokens or most, most))
        replayed = Replayed(request.replay)
        sequence = SimSequence(request, answer, self._clock.now())
        try:
            if kv is not None:
                sequence.blocks = asyncio.Event()
            self._enqueue(sequence)
            if kv is not None:
                await self._fetch(sequence, kv)
            while not replayed.cut(delta := await sequence.next()):
                pass
            delta.timings = FirstTokenTimings(
                sequence.started - sequence.arrived,
                self._clock.now() - sequence.started,
                sequence.transfer_s,
            )
            if (top := request.sampling.prompt_logprobs) is not None:
                delta.prompt_logprobs = [logprobs_at(t, top) for t in request.token_ids[1:]]
            yield delta
            while delta.finish_reason is None:
                delta = await sequence.next()
                replayed.cut(delta)
                yield delta
        finally:
            self._drop(sequence)

    async def prefill(
        self, request: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[Admitted | Prefilled]:
        sequence = SimSequence(request, None, self._clock.now())
        num_tokens = len(request.token_ids)
        descriptor: SimDescriptor | None = None
        held = False
        try:
            self._enqueue(sequence)
            num_bytes = num_tokens * self._config.kv_bytes_per_token
            descriptor = self._held.admit(num_bytes, transport)
            yield Admitted(descriptor if transport == GrpcDescriptor.transport else None)
            await sequence.next()
            self._drop(sequence)
            self._held.hold(descriptor, num_tokens, lease_s)
            held = True
        except DecodeError as error:
            raise PrefillError(ErrorReason.PREFILL_FAILED, error.message) from None
        finally:
            self._drop(sequence)
            if descriptor is not None and not held:
                self._held.release(descriptor)
        yield Prefilled(
            descriptor,
            sequence.cached_tokens,
            queue_s=sequence.started - sequence.arrived,
            prefill_s=self._clock.now() - sequence.started,
        )

    async def renew(self, descriptor: KvDescriptor, lease_s: float) -> LeaseEnd | None:
        assert isinstance(descriptor, SimDescriptor)
        return self._held.renew(descriptor, lease_s)

    async def release(self, descriptor: KvDescriptor) -> LeaseEnd:
        assert isinstance(descriptor, SimDescriptor)
        return self._held.release(descriptor)

    async def check(self) -> None:
        if self._dead is not None:
            raise DecodeError(ErrorReason.DECODE_FAILED, self._dead)

    async def close(self) -> None:
        self.fail("the engine was closed")
        await self._held.close()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def fail(self, message: str) -> None:
        """Dies as a real engine may: fails every sequence, and all that come later."""
        self._dead = self._dead or message
        for sequence in (*self._running, *self._waiting):
            sequence.fail(DecodeError(ErrorReason.DECODE_FAILED, message))
            if sequence.blocks is not None:
                sequence.blocks.set()
        self._wake.set()

    def _enqueue(self, sequence: SimSequence) -> None:
        if self._dead is not None:
            raise DecodeError(ErrorReason.DECODE_FAILED, self._dead)
        # One that can never be admitted would block all that come after it.
        most = min(self._config.context_length, self._config.kv_capacity_tokens) - 1
        if not 0 < sequence.num_tokens <= most:
            raise DecodeError(
                ErrorReason.DECODE_FAILED,
                f"a prompt of {sequence.num_tokens} tokens does not fit: 1 to {most} do",
            )
        self._waiting.append(sequence)
        self._wake.set()

    async def _fetch(self, sequence: SimSequence, kv: KvDescriptor) -> None:
        if not isinstance(kv, SimDescriptor):
            raise DecodeError(ErrorReason.KV_TRANSFER_FAILED, "not a simulated hand-off")
        num_tokens = len(sequence.request.token_ids)
        if kv.transport == GrpcDescriptor.transport:
            # Blocks came as they were read: what is left then are those of the last chunk.
            num_tokens = min(num_tokens, self._config.chunk_tokens)
        seconds = self._timing.transfer_s(num_tokens)
        assert sequence.blocks is not None
        await sequence.blocks.wait()
        if self._dead is not None:
            raise DecodeError(ErrorReason.DECODE_FAILED, self._dead)
        self._fetching += 1
        try:
            await sim_holder.fetch(self._sockets, kv, lambda: self._clock.sleep(seconds))
        finally:
            self._fetching -= 1
        self._transfers.append(Transfer(kv.transport, kv.num_bytes, seconds))
        sequence.transfer_s = seconds
        sequence.computed = len(sequence.request.token_ids)
        sequence.blocks = None
        self._cache.insert(sequence.chain)
        self._wake.set()

    def _drop(self, sequence: SimSequence) -> None:
        """Forgets a sequence, wherever it is; a step under way leaves it out."""
        sequence.dropped = True
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._used_tokens -= sequence.held
        sequence.held = 0
        self._wake.set()

    async def _run(self, listener: StepListener) -> None:
        due = self._clock.now()
        while self._dead is None:
            self._wake.clear()
            step = self._schedule()
            if step is None:
                self._publish(listener, EngineWork())
                await self._wake.wait()
                due = self._clock.now()
                continue
            if step.most > 1:
                steps, seconds = await step.pass_together(self._timing, self._clock, self._wake)
                due = self._clock.now()
            else:
                steps, seconds = 1, self._timing.step_s(step.work)
                # From when the last step was due, so that late wake-ups do not add up; but a
                # loop that cannot keep up is not chased by more than one step.
                due = max(due, self._clock.now() - seconds) + seconds
                await self._clock.sleep(max(0.0, due - self._clock.now()))
            work = step.done(steps, seconds, self.load.kv_usage)
            self._apply(step, steps)
            self._publish(listener, work)

    def _publish(self, listener: StepListener, work: EngineWork) -> None:
        stats = StepStats(
            self.load, self._prefix_queries, self._prefix_hits, tuple(self._transfers), work
        )
        self._prefix_queries = self._prefix_hits = 0
        self._transfers.clear()
        listener(stats)

    def _schedule(self) -> Step | None:
        self._admit()
        budget = self._config.chunk_tokens
        reading: list[tuple[SimSequence, int]] = []
        writing: list[SimSequence] = []
        read_pairs = writers = write_context = 0
        for sequence in self._running:
            if sequence.blocks is not None:
                continue
            if sequence.started < 0:
                sequence.started = self._clock.now()
            left = sequence.num_tokens - sequence.computed
            if left:
                chunk = min(left, budget)
                if not chunk:
                    continue
                budget -= chunk
                reading.append((sequence, chunk))
                read_pairs += chunk * sequence.computed + chunk**2 // 2
                if chunk < left:
                    continue
            writing.append(sequence)
            if sequence.writes:
                writers += 1
                write_context += sequence.num_tokens
        if not reading and not writing:
            return None
        work = StepWork(self._config.chunk_tokens - budget, read_pairs, writers, write_context)
        most = 1
        if not reading:
            free = self._config.kv_capacity_tokens - self._used_tokens - self._held.num_tokens
            sure = min(sequence.sure_tokens for sequence in writing)
            most = max(1, min(sure, free // len(writing)))
        return Step(reading, writing, work, most)

    def _admit(self) -> None:
        free = self._config.kv_capacity_tokens - self._used_tokens - self._held.num_tokens
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.num_tokens >= free and free < self._config.kv_capacity_tokens:
                return
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.held = sequence.num_tokens
            self._used_tokens += sequence.held
            free -= sequence.held
            self._begin(sequence)

    def _begin(self, sequence: SimSequence) -> None:
        request, tokens = sequence.request, sequence.request.token_ids
        sequence.chain = prefix.chain(tokens, request.cache_salt, BLOCK_SIZE, request.lora)
        if sequence.blocks is not None:
            sequence.blocks.set()
            return
        if sequence.started < 0:
            sequence.started = self._clock.now()
        sequence.computed = self._cache.lookup(sequence.chain, len(tokens))
        if not sequence.answered:
            sequence.cached_tokens = sequence.computed
            self._prefix_queries += len(tokens)
            self._prefix_hits += sequence.computed

    def _apply(self, step: Step, steps: int) -> None:
        """Delivers what so many steps brought, to all sequences in this one call."""
        for sequence, chunk in step.reading:
            sequence.computed += chunk
            if not sequence.dropped and sequence.computed >= len(sequence.request.token_ids):
                self._cache.insert(sequence.chain)
        for sequence in step.writing:
            if sequence.dropped:
                continue
            if sequence.advance(steps):
                self._running.remove(sequence)
                # The blocks of a prompt read for others stay: `prefill` has them held.
                if sequence.writes:
                    self._used_tokens -= sequence.held
                    sequence.held = 0
            else:
                sequence.held += steps
                self._used_tokens += steps
        while self._used_tokens + self._held.num_tokens > self._config.kv_capacity_tokens:
            victims = [sequence for sequence in self._running if sequence.blocks is None]
            if len(self._running) < 2 or not victims:
                break
            self._preempt(victims[-1])

    def _preempt(self, sequence: SimSequence) -> None:
        self._running.remove(sequence)
        self._used_tokens -= sequence.held
        sequence.held = sequence.computed = 0
        self._waiting.appendleft(sequence)


def _answer(request: EngineRequest, max_tokens: int) -> AnswerSource:
    replay = () if request.replay is None else request.replay.token_ids
    return Answer(request.token_ids, request.sampling, max_tokens, replay, request.lora)
