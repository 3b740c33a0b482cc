"""vLLM's executor for a core process that computes itself, on CPU machines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]
    """Computes a step when its result is asked for, where vLLM's own does so at once.

    `EngineCore.step` (vLLM 0.32) times a step from there on: by the other, none takes any time.
    """

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        compute = super().execute_model
        if not non_block:
            return compute(scheduler_output)
        return _Step(lambda: compute(scheduler_output))


class _Step(Future[Any]):
    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self._compute())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)
