"""What vLLM reports after its steps, as `StepStats`."""

from __future__ import annotations

from typing import Any

from pdserve.engine.base import EngineLoad, StepListener, StepStats, Transfer


class StepRecorder:
    """Turns vLLM's scheduler statistics into calls of a `StepListener`; keeps the last load.

    While blocks are on lease an idle engine makes hundreds of empty steps a second: a step
    that changed nothing is not passed on.
    """

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self.load = EngineLoad()

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
            transfers=nixl_transfers(stats.kv_connector_stats),
        )
        if step != StepStats(load=self.load):
            self.load = step.load
            self._listener(step)


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
