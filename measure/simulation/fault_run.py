"""One run of faults: carries a script out on a simulated fleet, and tells what was broken."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from coordinator.policy.health import SERVING
from coordinator.record import RequestRecord
from measure.simulation import virtual_time
from measure.simulation.cluster import Cluster, error_logs, record_of
from measure.simulation.fault_effects import begin
from measure.simulation.fault_script import CONTEXT, Ask, Fault, Script
from measure.simulation.invariants import (
    Told,
    not_counted_once,
    not_idle,
    not_stopped,
    wrong_answer,
)
from measure.simulation.network import Network
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Fallback, GenerateSpec, Mode, Role, SamplingParams, TextPrompt

STOP_S = 1.0
"""Within it, every worker stops what was refused, cancelled or has failed."""
END_S = 120.0
"""How long after the last fault a request may still be at work."""
QUIET_S = 15.0
"""After that, nothing is held: connections that stand still end within it."""
RECOVERY_S = 180.0
"""How long a fleet without faults may take to serve again; probes are a minute apart at most."""

_MEETING_S = 5.0
_RECOVERABLE = frozenset(
    reason.label
    for reason in ErrorReason
    if reason.value.retryable and not reason.touched_no_worker
)
"""What another worker need not fail with."""
_LOOKS = 50
_LOOK_S = 0.1


@dataclass(slots=True)
class Result:
    """`broken` says, in words, which invariant was; the same seed has the same `digest`."""

    seed: int
    broken: list[str] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.journal).encode(), digest_size=8).hexdigest()


def play(script: Script) -> Result:
    """Carries the script out. Whatever goes wrong is in the result, exceptions too."""
    result = Result(script.seed)
    with error_logs() as errors:
        try:
            virtual_time.run(_Run(script, result).play())
        except (Exception, asyncio.CancelledError) as error:
            result.broken.append(f"the run ended early: {error!r}")
    result.broken += [f"logged as an error: {line}" for line in errors]
    result.journal += result.broken
    return result


class _Run:
    def __init__(self, script: Script, result: Result) -> None:
        self._script = script
        self._result = result
        self._cluster = Cluster(
            script.workers,
            script.model,
            Network(Random(script.seed), script.latency_s),
            script.gateway,
            context_length=CONTEXT,
        )
        self._records: list[RequestRecord] = []
        self._began = 0.0
        self._disturbed: dict[str, float] = {}
        """Until when a worker may be hindered in what it is asked, by its name."""

    async def play(self) -> None:
        script, cluster = self._script, self._cluster
        loop = asyncio.get_running_loop()
        async with cluster.running(prove=True):
            await asyncio.sleep(_MEETING_S)
            self._began = loop.time()
            faults = [asyncio.create_task(self._befall(fault)) for fault in script.faults]
            asks = [
                asyncio.create_task(self._ask(f"r{number}", ask), name=f"r{number}")
                for number, ask in enumerate(script.asks)
            ]
            await asyncio.gather(*faults)
            _, late = await asyncio.wait(asks, timeout=END_S)
            if late:
                names = sorted(task.get_name() for task in late)
                self._result.broken.append(f"invariant 1: {names} do not end")
                return
            await asyncio.gather(*asks)
            await self._recovers()
            await asyncio.sleep(QUIET_S)
            self._result.broken += await self._comes_to_rest()
            self._result.broken += not_counted_once(cluster, self._records)

    async def _comes_to_rest(self) -> list[str]:
        """What is held though nothing is asked, nor has been for a while by a probe: one that
        waits behind a step of a slowed engine may take long."""
        give_up = asyncio.get_running_loop().time() + RECOVERY_S
        quiet = 0
        while held := not_idle(self._cluster):
            quiet = 0 if self._cluster.probing else quiet + 1
            if quiet == _LOOKS or asyncio.get_running_loop().time() > give_up:
                return held
            await asyncio.sleep(_LOOK_S)
        return []

    def _note(self, words: str) -> None:
        now = asyncio.get_running_loop().time() - self._began
        self._result.journal.append(f"{now:.6f} {words}")

    # Requests.

    async def _ask(self, request_id: str, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        told = Told()
        record = record_of(request_id)
        self._records.append(record)
        asking = asyncio.create_task(self._read(request_id, ask, record, told))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([asking], timeout=ask.leaves_s)
        if not asking.done():
            told.left = True
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        elif (failure := asking.exception()) is not None:
            self._result.broken.append(f"{request_id}: {failure!r}")
        self._note(f"{request_id} {told.words} {record.fallbacks} {told.text}")
        self._result.ended[told.words] = self._result.ended.get(told.words, 0) + 1
        faultless = self._script.is_faultless
        self._result.broken += wrong_answer(request_id, ask, told, record, faultless=faultless)
        if told.error in _RECOVERABLE and (well := self._well()):
            self._result.broken.append(
                f"invariant 2: {request_id} was told {told.error}, though {well} was well"
            )
        if told.error or told.left:
            await self._stops(request_id)

    async def _read(self, request_id: str, ask: Ask, record: RequestRecord, told: Told) -> None:
        spec = GenerateSpec(
            request_id,
            self._script.model.name,
            TextPrompt(ask.prompt),
            ask.sampling,
            mode=ask.mode,
            cache_salt=ask.cache_salt,
            deadline=None if ask.deadline_s is None else time.monotonic() + ask.deadline_s,
        )
        try:
            stream = await self._cluster.open(spec, record)
        except PdserveError as error:
            told.error = error.reason.label
            return
        try:
            async for delta in stream:
                told.take(delta)
        except PdserveError as error:
            told.error = error.reason.label
        finally:
            await stream.aclose()

    def _well(self) -> str:
        """A worker that nothing befell and that could have written the answer from beginning to
        end; empty where there was none."""
        if self._script.model.fallback is Fallback.FAIL:
            return ""
        for name, worker in self._cluster.workers.items():
            entry = self._cluster.fleet.by_id(name)
            roomy = worker.spec.engine.kv_capacity_tokens > len(self._script.asks) * CONTEXT
            serves = entry is not None and entry.state in SERVING and entry.hosts(Role.DECODE)
            if serves and roomy and name not in self._disturbed:
                return name
        return ""

    async def _stops(self, request_id: str) -> None:
        """Checks that nobody works for a request that is over, but whoever cannot know."""
        ended = asyncio.get_running_loop().time()
        # Messages may take their time besides, and the step under way is finished.
        grace_s = 4 * self._script.latency_s
        step_s = max(
            spec.engine.prefill_token_s * spec.engine.chunk_tokens + spec.engine.decode_step_s
            for spec in self._script.workers.values()
        )
        await asyncio.sleep(STOP_S + grace_s + step_s)
        for name, worker in self._cluster.workers.items():
            if self._disturbed.get(name, 0.0) < ended:
                self._result.broken += not_stopped(request_id, name, worker)

    async def _recovers(self) -> None:
        """Now that all is well again, a request is served."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + RECOVERY_S
        ask = Ask(0.0, "once more", SamplingParams(max_tokens=3), Mode.COLOCATED, "", None, None)
        told = Told(error="nothing")
        number = 0
        while told.error and loop.time() < give_up:
            record = record_of(f"again{number}")
            self._records.append(record)
            told = Told()
            await self._read(record.request_id, ask, record, told)
            number += 1
            await asyncio.sleep(2.0)
        if told.error:
            self._result.broken.append(
                f"{RECOVERY_S:.0f} s after the last fault, a request ends with {told.error}"
            )

    # Faults.

    async def _befall(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(fault.at_s)
        # What a fault has done shows on both sides of it, and for a while after it.
        for name in (fault.worker, fault.peer):
            until = loop.time() + fault.until_s - fault.at_s + 2 * QUIET_S
            self._disturbed[name] = max(self._disturbed.get(name, 0.0), until)
        self._note(f"{fault.kind} {fault.worker} {fault.peer}")
        end = await begin(self._cluster, fault)
        await asyncio.sleep(fault.until_s - fault.at_s)
        self._note(f"{fault.kind} {fault.worker} is over")
        await end()
