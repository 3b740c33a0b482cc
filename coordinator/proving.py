"""Compatibility is proven, not assumed: a worker or pair gets traffic after a probe went through.

A decode worker is proven by an answer of its own; a pair by a hand-off whose tokens are
those of the decode worker's own answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, product
from uuid import uuid4

import structlog

from coordinator.catalog import ServedModel
from coordinator.execution import Execution
from coordinator.fleet import Fleet
from coordinator.lifecycle import Event
from coordinator.policy.ladder import is_busy
from coordinator.policy.pairs import PROBED, Pair, Process, mixture, pairs_of
from coordinator.policy.snapshot import Plan
from coordinator.record import RequestRecord
from coordinator.worker import Worker
from pdserve.errors import PdserveError
from pdserve.types import EngineRequest, Role, SamplingParams, TextPrompt, WorkerInfo

log = structlog.get_logger("proving")

PROBE_TIMEOUT_S = 60.0
MAX_PROBES = 16
"""Probes at once; each worker takes part in few of them, so that one that hangs does not hold
up those of the others."""
MAX_PROBES_PER_WORKER = 2
PROBE_TEXT = "One, two, three, four, five, six, seven, eight, nine, ten. " * 4
"""Some 150 tokens in most vocabularies: several KV blocks, and near to no ties."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe of a pair, or of a decode process by itself, where `pair` is None."""

    decode: WorkerInfo
    prefill: WorkerInfo | None = None
    pair: Pair | None = None

    @property
    def worker_ids(self) -> set[str]:
        return {info.worker_id for info in (self.decode, self.prefill) if info is not None}


class Prover:
    """Probes what is new in the fleet, and again what failed, until cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ServedModel],
        report: Callable[[str], None],
        after_round: Callable[[], None],
    ) -> None:
        """`report` is told, in words, what is being probed; `after_round` runs whenever what
        is known may have changed."""
        self._fleet = fleet
        self._models = models
        self._report = report
        self._after_round = after_round
        self._running: set[_Probe] = set()
        self._answers: dict[Process, list[int]] = {}
        """Each proven decode process' own answer."""

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return bool(self._running)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as probes:
            while True:
                self._fleet.changed.clear()
                for probe in self._due():
                    if self._may_begin(probe):
                        self._running.add(probe)
                        probes.create_task(self._run(probe))
                self._after_round()
                wake_at = self._next_due()
                wait_s = None if wake_at is None else wake_at - self._fleet.clock.now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._fleet.changed.wait()

    async def _run(self, probe: _Probe) -> None:
        try:
            await (self._prove_alone(probe) if probe.pair is None else self._prove_pair(probe))
        except Exception:
            # What one worker sends must not end the proving of the others.
            log.exception("a probe went wrong", worker=probe.decode.worker_id)
            self._fail(probe)
        finally:
            self._running.discard(probe)
            self._fleet.changed.set()
            self._fleet.tell()

    def _fail(self, probe: _Probe) -> None:
        cause, now = "probe failed: internal error", self._fleet.clock.now()
        if probe.pair is not None:
            self._fleet.pairs.probe_failed(probe.pair, cause, now)
            return
        worker = self._fleet.by_id(probe.decode.worker_id)
        if worker is not None and worker.info is probe.decode:
            worker.detail = cause
            worker.standing = worker.standing.probe_failed(cause, now)

    def _due(self) -> list[_Probe]:
        """All that is to be probed now: decode processes by themselves, then pairs."""
        now = self._fleet.clock.now()
        members = {
            worker.process: worker for worker in self._fleet.workers() if self._may_join(worker)
        }
        infos = {process: worker.info for process, worker in members.items() if worker.info}
        decodes = [worker for worker in members.values() if worker.hosts(Role.DECODE)]
        prefills = [worker for worker in members.values() if worker.hosts(Role.PREFILL)]
        known = {worker.process for worker in self._fleet.workers() if worker.info is not None}
        self._answers = {p: tokens for p, tokens in self._answers.items() if p in known}
        alone = [
            _Probe(infos[worker.process])
            for worker in decodes
            if worker.standing.state in PROBED and worker.standing.probe_at <= now
        ]
        for prefill, decode in product(prefills, decodes):
            self._meet(prefill, decode)
        return alone + [
            _Probe(infos[pair.decode], infos[pair.prefill], pair)
            for pair in self._fleet.pairs.due(now)
            if infos.keys() >= {pair.prefill, pair.decode} and members[pair.decode].proven
        ]

    def _next_due(self) -> float | None:
        now = self._fleet.clock.now()
        times = [
            worker.standing.probe_at
            for worker in self._fleet.workers()
            if worker.hosts(Role.DECODE)
            and worker.standing.state in PROBED
            and worker.standing.probe_at > now
        ]
        pair = self._fleet.pairs.next_probe(now)
        return min(times if pair is None else [*times, pair], default=None)

    def _may_begin(self, probe: _Probe) -> bool:
        busy = Counter(chain.from_iterable(other.worker_ids for other in self._running))
        return (
            probe not in self._running
            and len(self._running) < MAX_PROBES
            and all(busy[worker_id] < MAX_PROBES_PER_WORKER for worker_id in probe.worker_ids)
        )

    def _may_join(self, worker: Worker) -> bool:
        if not worker.connected or worker.silent or worker.leaving or worker.info is None:
            return False
        model = self._models.get(worker.info.model)
        if model is None:
            worker.detail = f"serves {worker.info.model!r}, which is not in coordinator.models"
            return False
        if missing := model.config.lora.keys() - set(worker.info.adapters):
            worker.detail = f"lacks the LoRA adapters {', '.join(sorted(missing))}"
            return False
        return True

    def _meet(self, prefill: Worker, decode: Worker) -> None:
        assert prefill.info is not None
        assert decode.info is not None
        if (
            prefill is decode
            or prefill.info.model != decode.info.model
            or self._fleet.pairs.have_met(prefill.process, decode.process)
        ):
            return
        model = self._models[decode.info.model]
        wanted, mixed = model.policy.transport, model.config.mixed_precision
        pairs = pairs_of(prefill.info, decode.info, wanted, mixed_precision=mixed)
        for pair, refusal in pairs.items():
            self._fleet.pairs.meet(pair, refusal)

    async def _prove_alone(self, probe: _Probe) -> None:
        info = probe.decode
        self._report(f"{info.worker_id} answers a prompt by itself")
        cause = ""
        busy = False
        try:
            tokens = await self._probe(info.model, Plan(None, info.worker_id, "", "probe"))
        except (PdserveError, TimeoutError) as error:
            cause = f"probe failed: {_words(error)}"
            busy = isinstance(error, PdserveError) and is_busy(error.reason)
        worker = self._fleet.by_id(info.worker_id)
        if worker is None or worker.info is not info:
            return  # another process answered, or none is left
        worker.detail = cause
        if cause:
            verdict = worker.standing.probe_put_off if busy else worker.standing.probe_failed
            worker.standing = verdict(cause, self._fleet.clock.now())
            log.warning("worker not proven", worker=info.worker_id, cause=cause)
            return
        self._answers[worker.process] = tokens
        worker.standing = worker.standing.probe_passed("")
        log.info("worker proven", worker=info.worker_id)

    async def _prove_pair(self, probe: _Probe) -> None:
        assert probe.prefill is not None
        assert probe.pair is not None
        pair, model = probe.pair, probe.decode.model
        ids = pair.prefill[0], pair.decode[0]
        self._report(f"{ids[0]} hands a prompt over to {ids[1]} by {pair.transport}")
        cause = ""
        # Weights can differ here only where mixed_precision allows it.
        note = mixture(probe.prefill, probe.decode)
        busy = False
        try:
            tokens = await self._probe(model, Plan(*ids, "", "probe", pair.transport))
        except (PdserveError, TimeoutError) as error:
            cause = f"probe failed: {_words(error)}"
            busy = isinstance(error, PdserveError) and is_busy(error.reason)
        else:
            # None where the decode process was lost meanwhile, and the verdict is too late.
            if tokens != self._answers.get(pair.decode):
                if note:
                    note += "; answers differ, as mixed_precision allows"
                else:
                    cause = "the handed-over answer differs from the decode worker's own"
        pairs, now = self._fleet.pairs, self._fleet.clock.now()
        if busy:
            pairs.probe_put_off(pair, cause, now)
        elif cause:
            pairs.probe_failed(pair, cause, now)
        else:
            pairs.probe_passed(pair, note)
            self._fleet.prefill_proven(pair)
        log.log(
            30 if cause else 20,
            "pair not proven" if cause else "pair proven",
            prefill=ids[0],
            decode=ids[1],
            transport=pair.transport,
            cause=cause or None,
            note=note or None,
        )

    async def _probe(self, model: str, plan: Plan) -> list[int]:
        """The tokens that a short greedy request gets on this way; a fresh salt keeps prefix
        caches out of it."""
        request = EngineRequest(
            request_id=f"probe-{uuid4().hex}",
            token_ids=await self._models[model].encoder.encode_async(TextPrompt(PROBE_TEXT)),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            cache_salt=uuid4().hex,
        )
        record = RequestRecord(
            request.request_id, "probe", "completion", False, "", time.monotonic()
        )
        record.apply(Event.PLAN)
        execution = Execution(self._fleet, plan, request)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                delta = await execution.begin(record)
                tokens = list(delta.token_ids)
                while delta.finish_reason is None:
                    delta = await execution.next()
                    tokens += delta.token_ids
        finally:
            execution.release()
        return tokens


def _words(error: PdserveError | TimeoutError) -> str:
    return str(error) or f"no answer within {PROBE_TIMEOUT_S:.0f} s"
