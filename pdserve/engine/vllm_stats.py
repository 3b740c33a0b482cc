"""What vLLM reports after its steps, as `StepStats`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pdserve.engine.base import EngineLoad, StepListener, StepStats, Transfer
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import EngineWork, GrpcDescriptor, LeaseEnd, NixlDescriptor

_MAX_TOLD = 4096


class StepRecorder:
    """Turns vLLM's scheduler statistics into calls of a `StepListener`; keeps the last load.

    While blocks are on lease an idle engine makes hundreds of empty steps a second: a step
    that changed nothing is not passed on.
    """

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self.load = EngineLoad()
        self._failures: dict[str, DecodeError] = {}
        self._fetched: dict[str, float] = {}
        self._ended: dict[str, list[LeaseEnd]] = {}
        self._holds_changed = asyncio.Event()
        self._prefill_pairs = 0

    def take_failure(self, name: str) -> DecodeError | None:
        """Why a transfer into this engine failed, by what its holder calls it; told once."""
        return self._failures.pop(name, None)

    def take_transfer_s(self, name: str) -> float:
        """What a transfer into this engine took, in the worker where it took longest, by what its
        holder calls it; told once. 0 where it is not known."""
        return self._fetched.pop(name, 0.0)

    def end_of(self, name: str, num_workers: int) -> LeaseEnd | None:
        """How a hold of this engine ended: as in the worker where it ended worst, once it has in
        all of them."""
        ends = self._ended.get(name, ())
        return max(ends, key=tuple(LeaseEnd).index) if len(ends) == num_workers else None

    async def ended(self, name: str, num_workers: int) -> LeaseEnd:
        """Returns when the hold has ended."""
        while (end := self.end_of(name, num_workers)) is None:
            await self._holds_changed.wait()
        return end

    def read(self, num_tokens: int, cached_tokens: int) -> None:
        """A prompt was read, from after its cached tokens on."""
        self._prefill_pairs += (num_tokens**2 - cached_tokens**2) // 2

    def record(self, stats: Any) -> None:
        """Takes vLLM's `SchedulerStats` of one step."""
        prefix = stats.prefix_cache_stats
        step = StepStats(
            load=EngineLoad(
                running=stats.num_running_reqs,
                waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                kv_usage=stats.kv_cache_usage,
            ),
            prefix_queries=prefix.queries,
            prefix_hits=prefix.hits,
            transfers=self._transfers(stats.kv_connector_stats or {}),
            work=self._work(stats.iteration_details, stats.kv_cache_usage),
        )
        if step != StepStats(load=self.load):
            self.load = step.load
            self._listener(step)

    def _work(self, details: Any, kv_usage: float) -> EngineWork:
        """Takes vLLM's `SchedulerIterationDetails`; None for a step in which nothing ran.

        It does not say what the tokens of a chunk came after: a prompt's pairs count in the
        step after its last.
        """
        if details is None or details.is_dummy:
            return EngineWork()
        pairs, self._prefill_pairs = self._prefill_pairs, 0
        writes = details.num_generation_requests
        return EngineWork(
            steps=1,
            seconds=details.elapsed_ms / 1000,
            prefill_tokens=details.num_ctx_tokens,
            prefill_pairs=pairs,
            sequences=writes,
            kv_usage=kv_usage if writes else 0.0,
        )

    def _transfers(self, payload: dict[str, Any]) -> tuple[Transfer, ...]:
        """Takes what each transport's connector reports; `payload` has it by their classes."""
        grpc, nixl = payload.get("PdGrpcConnector", {}), payload.get("PdNixlConnector", {})
        for each in (grpc, nixl):
            for name, reason, message in each.get("failures", ()):
                self._failures[name] = DecodeError(ErrorReason[reason], message)
            for name, seconds in each.get("fetched", ()):
                self._fetched[name] = max(seconds, self._fetched.get(name, 0.0))
            for name, end in each.get("ended", ()):
                self._ended.setdefault(name, []).append(LeaseEnd(end))
        # Every waiter holds the event of its own time: setting it wakes them all, once.
        self._holds_changed.set()
        self._holds_changed = asyncio.Event()
        # Nobody may have asked for those of requests that were given up.
        for told in (self._failures, self._fetched, self._ended):
            while len(told) > _MAX_TOLD:
                del told[next(iter(told))]
        return _nixl_transfers(nixl) + tuple(
            Transfer(GrpcDescriptor.transport, size, seconds)
            for size, seconds in grpc.get("transfers", ())
        )


def _nixl_transfers(payload: Mapping[str, Any]) -> tuple[Transfer, ...]:
    """The transfers in the statistics of vLLM's NIXL connector: bytes and seconds, one each."""
    if not payload:
        return ()
    pairs = zip(payload["bytes_transferred"], payload["transfer_duration"], strict=True)
    return tuple(
        Transfer(NixlDescriptor.transport, int(size), float(seconds)) for size, seconds in pairs
    )


def stat_logger_factory(recorder: StepRecorder) -> Any:
    """What vLLM's AsyncLLM takes in `stat_loggers`: makes a logger that feeds `recorder`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class _Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                recorder.record(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    return _Logger
