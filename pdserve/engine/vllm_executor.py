"""vLLM's executor for a core process that computes itself, on CPU machines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]
    """Computes a step when its result is asked for, where vLLM's own does so at once.

    `EngineCore.step` (vLLM 0.32) times a step from there on: by the other, none takes any time.
    """

    def _init_executor(self) -> None:
        if len(get_visible_memory_node()) == 1:
            # vLLM's CPU worker moves what it has to its memory node. Where there is but one, that
            # moves nothing, and yet the kernel waits for a turn of its own on every core: beside
            # engines that never pause, a worker did not start for minutes (Linux 6.18).
            torch.ops._C.init_cpu_memory_env = _stay  # type: ignore[attr-defined]
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        compute = super().execute_model
        if not non_block:
            return compute(scheduler_output)
        return _Step(lambda: compute(scheduler_output))


def _stay(nodes: list[int]) -> None:
    """In place of `init_cpu_memory_env`, an operator of vLLM 0.32."""


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
