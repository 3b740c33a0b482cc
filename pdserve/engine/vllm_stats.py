"""What vLLM reports after its steps, as `StepStats`."""

from __future__ import annotations

from typing import Any

from pdserve.engine.base import EngineLoad, StepListener, StepStats, Transfer
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import EngineWork, GrpcDescriptor

_MAX_FAILURES = 256


class StepRecorder:
    """Turns vLLM's scheduler statistics into calls of a `StepListener`; keeps the last load.

    While blocks are on lease an idle engine makes hundreds of empty steps a second: a step
    that changed nothing is not passed on.
    """

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self.load = EngineLoad()
        self._failures: dict[str, DecodeError] = {}
        self._ended: set[str] = set()
        self._prefill_pairs = 0

    def take_failure(self, transfer_id: str) -> DecodeError | None:
        """Why a transfer over gRPC into this engine failed; told once."""
        return self._failures.pop(transfer_id, None)

    def take_ended(self) -> set[str]:
        """The transfer ids of holds over gRPC that the engine has ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended

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
        grpc = payload.get("PdGrpcConnector", {})
        while len(self._failures) > _MAX_FAILURES:  # of requests that were given up meanwhile
            del self._failures[next(iter(self._failures))]
        for transfer_id, reason, message in grpc.get("failures", ()):
            self._failures[transfer_id] = DecodeError(ErrorReason[reason], message)
        self._ended.update(grpc.get("ended", ()))
        return nixl_transfers(payload.get("PdNixlConnector")) + tuple(
            Transfer(GrpcDescriptor.transport, size, seconds)
            for size, seconds in grpc.get("transfers", ())
        )


def nixl_transfers(payload: dict[str, Any] | None) -> tuple[Transfer, ...]:
    """The transfers in the statistics of vLLM's NIXL connector: bytes and seconds, one each."""
    if not payload:
        return ()
    pairs = zip(payload["bytes_transferred"], payload["transfer_duration"], strict=True)
    return tuple(Transfer("nixl", int(size), float(seconds)) for size, seconds in pairs)


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
