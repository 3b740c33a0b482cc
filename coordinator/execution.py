"""One plan, carried out for one request, up to its first token; and what it then holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.fleet import Fleet
from coordinator.lifecycle import Event
from coordinator.policy.prefix import PromptBlocks
from coordinator.policy.pricing import Seat
from coordinator.policy.snapshot import Plan
from coordinator.record import RequestRecord
from coordinator.sequence import Sequence, Take
from coordinator.worker import Worker
from coordinator.worker_client import PrefillCall, Session
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import Delta, EngineRequest, KvHandle, PrefillResult, Role, Usage

CAUSE_S = 0.25
"""How long a prefill worker is given to say why blocks of its own do not come."""


class Execution:
    """Owns a sequence on a decode worker and, for a while, an open call of a prefill worker,
    which is the lease on its blocks.

    `release` gives back both and may be called at any time, more than once.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        request: EngineRequest,
        prompt: PromptBlocks | None = None,
        cached_tokens: int = 0,
        answered: int = 0,
    ) -> None:
        """`prompt` is that of the request, where the workers' caches are to be believed to hold
        it from then on; `cached_tokens` of it are believed to be where it is read already. Its
        last `answered` tokens are the beginning of the answer."""
        self.plan = plan
        self._answered = answered
        self._fleet = fleet
        self._request = request
        self._prompt = prompt
        self._cached_tokens = cached_tokens
        self._decode: Worker | None = None
        self._writes = False
        self._session: Session | None = None
        self._sequence: Sequence | None = None
        self._prefilled: PrefillResult | None = None
        self._prefilled_at = 0.0
        self._prefill: PrefillCall | None = None

    async def begin(self, record: RequestRecord) -> Delta:
        """Runs the plan until the first delta, telling `record` each phase.

        Raises PrefillError or DecodeError by the side that failed.
        """
        decode = self._decode = self._claim(self.plan.decode)
        session = self._session = decode.session
        if session is None:
            raise DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")
        sequence = self._sequence = session.open()
        if self.plan.prefill is not None:
            await self._hand_over(session, sequence, record)
            record.apply(Event.START)
            first = await sequence.next()
        else:
            record.apply(Event.START)
            with self._reading(decode):
                session.start(sequence, self._request, None)
                first = await sequence.next()
        record.apply(Event.FIRST_TOKEN)
        if first.timings is not None:
            took = {"first_step": first.timings.first_step_s}
            if self._prefilled is not None:
                took = {"transfer": first.timings.transfer_s} | took
            record.phase("decode_queue", **took)
        self._end_lease()
        decode.writing += 1
        self._writes = True
        self._expect_cached(decode)
        self._observe_hand_over(decode, first)
        self._tell_seats(decode, record)
        return self._with_true_usage(first)

    @property
    def lost(self) -> bool:
        """Whether the session with the decode worker has ended."""
        return self._session is None or self._session.lost

    @property
    def given(self) -> tuple[list[int], int]:
        """All tokens that came, and the number of characters that came with them."""
        sequence = self._sequence
        return ([], 0) if sequence is None else (sequence.token_ids, sequence.num_chars)

    async def next(self) -> Delta:
        """The next delta after the first. Raises DecodeError when the worker is lost."""
        assert self._sequence is not None
        delta = await self._sequence.next()
        return delta if delta.usage is None else self._with_true_usage(delta)

    @property
    def answered_tokens(self) -> int:
        """Tokens of the answer so far, also of what came before this execution."""
        return self._answered + len(self.given[0])

    @property
    def sharing(self) -> int | None:
        """Answers that its decode worker writes at once, this one too; None once released."""
        return None if self._decode is None else self._decode.view.writing

    def forward(self, take: Take) -> None:
        """As `Sequence.forward`; after `begin`."""
        assert self._sequence is not None
        self._sequence.forward(take)

    def fail(self, cause: DecodeError) -> None:
        """Stops the work at once; `next` raises `cause` after what was there before."""
        if self._sequence is not None:
            self._sequence.fail(cause)
        self.release()

    def release(self) -> None:
        """Drops the sequence, if it still runs, and ends the lease, if it is still open."""
        self._end_lease()
        if self._session is not None and self._sequence is not None:
            self._session.abort(self._sequence)
            self._session = None
        if self._decode is not None:
            self._decode.give(-1)
            self._decode.writing -= self._writes
            self._decode = None

    def _claim(self, worker_id: str) -> Worker:
        worker = self._fleet.by_id(worker_id)
        if worker is None:
            raise DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")
        worker.give(1)
        return worker

    async def _hand_over(self, session: Session, sequence: Sequence, record: RequestRecord) -> None:
        """Has the prompt read elsewhere and started on the decode worker, from its handle.

        Room on the decode side first, then the prefill: no prefill is wasted on a full pool.
        Where the handle is good from admission on, the blocks travel while others are read.
        """
        request = self._request
        record.apply(Event.RESERVE)
        assert self.plan.prefill is not None
        worker = self._fleet.by_id(self.plan.prefill)
        if worker is None:
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker was lost")
        # It counts there from now on: of prompts that come together, each is planned for in the
        # knowledge of those before it.
        with self._reading(worker):
            assert request.sampling.max_tokens is not None
            session.reserve(sequence, len(request.token_ids) + request.sampling.max_tokens)
            await sequence.reserved()
            record.phase("reserve")
            record.apply(Event.PREFILL)
            call = self._prefill = worker.client.prefill(request, self.plan.transport)
            async with worker.or_loss():
                async with sequence.or_failure():
                    early = await call.admitted()
                if early is not None:
                    self._start(session, sequence, worker, early)
                result = self._prefilled = await _read(call, sequence)
        self._prefilled_at = time.monotonic()
        record.phase("prefill_queue", prefill=result.prefill_s)
        self._expect_cached(worker)
        if early is None:
            self._start(session, sequence, worker, result.handle)

    def _start(
        self, session: Session, sequence: Sequence, prefill: Worker, handle: KvHandle
    ) -> None:
        assert prefill.info is not None
        if handle.epoch != prefill.info.epoch:
            raise PrefillError(
                ErrorReason.KV_STALE_EPOCH, "the prefill worker was restarted meanwhile"
            )
        session.start(sequence, self._request, handle)

    @contextmanager
    def _reading(self, worker: Worker) -> Iterator[None]:
        """Counts the prompt's uncached tokens as outstanding on a worker while it reads them."""
        num_tokens = len(self._request.token_ids)
        cached = min(self._cached_tokens, num_tokens - 1)
        tokens, pairs = num_tokens - cached, (num_tokens**2 - cached**2) // 2
        clock = self._fleet.clock
        worker.give_prompt(tokens, pairs, clock.now())
        try:
            yield
        finally:
            worker.take_prompt(tokens, pairs, clock.now())

    def _expect_cached(self, worker: Worker) -> None:
        if self._prompt is not None and worker.cache is not None:
            worker.cache.expect(self._prompt)

    def _end_lease(self) -> None:
        if self._prefill is not None:
            self._prefill.end()
            self._prefill = None

    def _with_true_usage(self, delta: Delta) -> Delta:
        """A handed-over prompt was read by the prefill worker: its cache hits are the true ones.
        What was read again of the answer is no part of the prompt."""
        if delta.usage is None:
            return delta
        cached = delta.usage.cached_tokens
        if self._prefilled is not None:
            cached = self._prefilled.cached_tokens
        prompt_tokens = delta.usage.prompt_tokens - self._answered
        delta.usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=delta.usage.completion_tokens + self._answered,
            cached_tokens=min(cached, prompt_tokens),
        )
        return delta

    def _tell_seats(self, decode: Worker, record: RequestRecord) -> None:
        """A prompt that another worker had to read again is charged as the first one read it."""
        record.writer = self._seat(decode)
        if record.reader is None:
            prefill = self._fleet.by_id(self.plan.prefill or "")
            record.reader = record.writer if prefill is None else self._seat(prefill)

    def _seat(self, worker: Worker) -> Seat:
        assert worker.info is not None
        view, shape = worker.view, worker.info.fingerprint
        return Seat(
            self._fleet.estimators[worker.info.model].estimates.of(view.pool),
            shape.tensor_parallel * shape.pipeline_parallel,
            view.chunk_tokens,
            max(1, view.writing),
            reads_only=not worker.hosts(Role.DECODE),
        )

    def _observe_hand_over(self, decode: Worker, first: Delta) -> None:
        if self._prefilled is None or first.timings is None:
            return
        assert decode.info is not None
        taken_s = time.monotonic() - self._prefilled_at - first.timings.first_step_s
        estimator = self._fleet.estimators[decode.info.model]
        estimator.observe_hand_over(len(self._request.token_ids), taken_s)


async def _read(call: PrefillCall, sequence: Sequence) -> PrefillResult:
    """Returns when the prompt is read. Raises PrefillError, or what the sequence failed with.

    A sequence that waits for the blocks of a prompt which cannot be read fails too, and may be
    heard of first; but the prefill worker knows the cause.
    """
    reading = asyncio.create_task(call.finished())
    # Where it fails and the sequence has failed first, nobody asks why.
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        async with sequence.or_failure():
            return await asyncio.shield(reading)
    except DecodeError as failure:
        if failure.reason is ErrorReason.KV_TRANSFER_FAILED:
            await asyncio.wait([reading], timeout=CAUSE_S)
        if reading.done():
            reading.result()
        raise
    finally:
        reading.cancel()
