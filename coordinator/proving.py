"""Compatibility is proven, not assumed: a worker or pair gets traffic after a probe went through.

A decode worker is proven by an answer of its own; a pair by a hand-off whose tokens are
those of the decode worker's own answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from uuid import uuid4

import structlog

from coordinator.catalog import ServedModel
from coordinator.execution import Execution
from coordinator.fleet import Fleet, Pair, Worker
from coordinator.lifecycle import Event
from coordinator.policy.snapshot import Plan
from coordinator.record import RequestRecord
from pdserve.errors import PdserveError
from pdserve.types import EngineRequest, Fingerprint, Role, SamplingParams, TextPrompt

log = structlog.get_logger("proving")

PROBE_TIMEOUT_S = 60.0
RETRY_S = 2.0
PROBE_TEXT = "One, two, three, four, five, six, seven, eight, nine, ten. " * 4
"""Some 150 tokens in most vocabularies: several KV blocks, and near to no ties."""


class Prover:
    """Probes what is new in the fleet, and again what failed, until cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ServedModel],
        report: Callable[[str], None],
        after_round: Callable[[], None],
    ) -> None:
        """`report` is told, in words, what is being probed; `after_round` runs after each
        round of probes."""
        self._fleet = fleet
        self._models = models
        self._report = report
        self._after_round = after_round
        self._answers: dict[tuple[str, str], list[int]] = {}
        """Each proven decode process' own answer, by (worker id, epoch)."""

    async def run(self) -> None:
        while True:
            self._fleet.changed.clear()
            complete = await self._round()
            self._after_round()
            try:
                async with asyncio.timeout(None if complete else RETRY_S):
                    await self._fleet.changed.wait()
            except TimeoutError:
                continue

    async def _round(self) -> bool:
        """Probes all that is not proven; whether nothing is left to try again."""
        connected = [w for w in self._fleet.workers() if w.connected and not w.load.draining]
        decodes = [w for w in connected if w.hosts(Role.DECODE) and self._serves_model(w)]
        prefills = [w for w in connected if w.hosts(Role.PREFILL) and self._serves_model(w)]
        alone = [await self._prove_alone(w) for w in decodes if not w.proven]
        pairs = [
            await self._prove_pair(p, d)
            for p in prefills
            for d in decodes
            if p is not d and d.proven and p.info and d.info and p.info.model == d.info.model
        ]
        return all(alone) and all(pairs)

    def _serves_model(self, worker: Worker) -> bool:
        assert worker.info is not None
        if worker.info.model in self._models:
            return True
        worker.detail = f"serves {worker.info.model!r}, which is not in coordinator.models"
        return False

    async def _prove_alone(self, worker: Worker) -> bool:
        assert worker.info is not None
        info = worker.info
        self._report(f"{info.worker_id} answers a prompt by itself")
        try:
            tokens = await self._probe(info.model, Plan(None, info.worker_id, "", "probe"))
        except (PdserveError, TimeoutError) as error:
            worker.detail = f"probe failed: {_words(error)}"
            log.warning("probe failed", worker=info.worker_id, cause=_words(error))
            return False
        if worker.info is not info or not worker.connected:
            return False  # another process answered, or none is left
        self._answers[info.worker_id, info.epoch] = tokens
        worker.proven = True
        worker.detail = ""
        log.info("worker proven", worker=info.worker_id)
        return True

    async def _prove_pair(self, prefill: Worker, decode: Worker) -> bool:
        assert prefill.info is not None
        assert decode.info is not None
        pair = Pair(
            (prefill.info.worker_id, prefill.info.epoch), (decode.info.worker_id, decode.info.epoch)
        )
        if self._fleet.pairs.get(pair) == "":
            return True
        refusal = differences(prefill.info.fingerprint, decode.info.fingerprint)
        if not set(prefill.info.transports) & set(decode.info.transports):
            refusal = "no KV transport in common"
        if refusal:
            self._fleet.judge(pair, refusal)  # for good: both are constant for their process
            return True
        self._report(f"{prefill.info.worker_id} hands a prompt over to {decode.info.worker_id}")
        plan = Plan(prefill.info.worker_id, decode.info.worker_id, "", "probe")
        try:
            tokens = await self._probe(decode.info.model, plan)
        except (PdserveError, TimeoutError) as error:
            refusal = f"probe failed: {_words(error)}"
        else:
            if tokens != self._answers[pair.decode]:
                refusal = self._differing(decode.info.model)
        self._fleet.judge(pair, refusal)
        log.log(
            30 if refusal else 20,
            "pair refused" if refusal else "pair proven",
            prefill=prefill.info.worker_id,
            decode=decode.info.worker_id,
            cause=refusal or None,
        )
        return not refusal

    def _differing(self, model: str) -> str:
        """Why a pair with unequal answers is refused; empty where it is allowed to be so."""
        if self._models[model].config.mixed_precision:
            log.warning("answers differ, as mixed_precision allows", model=model)
            return ""
        return "the handed-over answer differs from the decode worker's own"

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


def differences(prefill: Fingerprint, decode: Fingerprint) -> str:
    """In words, each field in which two fingerprints differ; empty when none does."""
    return "; ".join(
        f"{name} is {ours!r} on the prefill side and {theirs!r} on the decode side"
        for name in Fingerprint.__slots__
        if (ours := getattr(prefill, name)) != (theirs := getattr(decode, name))
    )


def _words(error: PdserveError | TimeoutError) -> str:
    return str(error) or f"no answer within {PROBE_TIMEOUT_S:.0f} s"
