"""Life of vLLM's processes: how they start, how one learns that they died, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from pdserve.engine.base import EngineInfo
from pdserve.engine.child import FAULTS_FILE, one_line
from pdserve.engine.kv.layout import block_layout, kv_dtype, required_layout
from pdserve.engine.vllm_args import (
    VllmEngineConfig,
    check_config,
    check_cpu,
    engine_args,
    set_cpu_environment,
    set_environment,
)
from pdserve.engine.vllm_cache import CacheFollower
from pdserve.engine.vllm_stats import StepRecorder, stat_logger_factory
from pdserve.errors import ConfigError
from pdserve.section import in_words
from pdserve.types import Fingerprint

_SHUTDOWN_S = 5.0
"""How long the engine's processes get to end by themselves."""


class EngineProcess:
    """vLLM's AsyncLLM and the processes that it starts; `start` once, `close` as often as liked."""

    def __init__(self, config: VllmEngineConfig, epoch: str, recorder: StepRecorder) -> None:
        """`epoch` is random at each start."""
        self._config = config
        self._epoch = epoch
        self._recorder = recorder
        self._llm: Any = None
        self._cache: CacheFollower | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-engine-")
        # One thread, kept until the end: the kernel kills the engine's processes when the thread
        # that started them ends (`die_with_parent`).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-engine")
        self._children: list[psutil.Process] = []
        self._closed = False
        self._lock = threading.Lock()
        self._given_up = False
        self._spawning = False
        self.can_replay = False
        """Whether an answer may begin with tokens that are decided already; after `start`."""

    @property
    def llm(self) -> Any:
        return self._llm

    @property
    def cache(self) -> CacheFollower:
        """Valid after `start`."""
        assert self._cache is not None
        return self._cache

    @property
    def alive(self) -> bool:
        return self._llm is not None and not self._closed and not self._llm.errored

    async def start(self) -> EngineInfo:
        """Loads the model. Raises ConfigError, in one line, when it cannot."""
        loop = asyncio.get_running_loop()
        check_config(self._config)
        _check_plugin()
        set_environment(self._config, Path(self._folder.name))
        cache = self._cache = CacheFollower(Path(self._folder.name))
        starting = loop.run_in_executor(self._thread, self._build, cache.endpoint)
        try:
            self._llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await self._give_up(starting)
            raise
        self._children = _engine_processes()
        cache.follow(self._llm.vllm_config.cache_config.block_size)
        return _info(self._config, self._llm.vllm_config)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        llm, self._llm = self._llm, None
        if llm is not None:
            # First, or it would log as an error that the engine is gone.
            llm.output_handler.cancel()
            await loop.run_in_executor(self._thread, llm.shutdown, _SHUTDOWN_S)
            # Left to the garbage collector by vLLM 0.32, with two threads of its own.
            await loop.run_in_executor(self._thread, llm.engine_core.resources.ctx.term)
        _kill(self._children)
        if self._cache is not None:
            await self._cache.close()
        # Not waited for: its thread may be inside a start that is being given up.
        self._thread.shutdown(wait=False)
        self._folder.cleanup()

    async def _give_up(self, starting: asyncio.Future[Any]) -> None:
        """Makes a start that is under way leave no process; its thread cannot be interrupted."""
        with self._lock:
            self._given_up = True
            if not self._spawning:
                return  # it will see the flag before it starts one
        while not starting.done():
            _kill(_engine_processes())
            await asyncio.wait([starting], timeout=0.1)
        with contextlib.suppress(ConfigError):
            starting.result().shutdown()

    def _build(self, cache_events: str) -> Any:
        """Imports vLLM and starts it; takes from seconds to minutes."""
        try:
            from vllm.config import KVEventsConfig, KVTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            args = engine_args(self._config, self._epoch, cache_events)
            if current_platform.is_cpu():
                check_cpu(self._config)
                set_cpu_environment()
                if self._config.tensor_parallel == 1:
                    from pdserve.engine.vllm_executor import CoreExecutor

                    args.setdefault("distributed_executor_backend", CoreExecutor)
            if isinstance(transfer := args.get("kv_transfer_config"), dict):
                args["kv_transfer_config"] = KVTransferConfig(**transfer)
            if isinstance(events := args["kv_events_config"], dict):
                args["kv_events_config"] = KVEventsConfig(**events)
            vllm_config = AsyncEngineArgs(**args).create_engine_config()
            from pdserve.engine import vllm_replay

            self.can_replay = vllm_replay.install(vllm_config)
            with self._lock:
                if self._given_up:
                    raise ConfigError("the start was given up")
                self._spawning = True
            with _cores_given(vllm_config):
                return _without_finalizer(AsyncLLM).from_vllm_config(
                    vllm_config,
                    stat_loggers=[stat_logger_factory(self._recorder)],
                    # Statistics go to our own logger; vLLM's gauges cost more than they tell.
                    disable_log_stats=True,
                )
        except ConfigError:
            raise
        except Exception as error:
            # vLLM has one exception for all that fails in its processes; they wrote down why.
            fault = self._first_fault() or _reason(error)
            raise ConfigError(f"vLLM cannot start: {fault}") from error

    def _first_fault(self) -> str | None:
        faults = Path(self._folder.name) / FAULTS_FILE
        if not faults.exists():
            return None
        return next(iter(faults.read_text(encoding="utf-8").splitlines()), None)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return in_words(error)
    return one_line(error)


@contextlib.contextmanager
def _cores_given(vllm_config: Any) -> Iterator[None]:
    """Has a core process that computes itself use the cores that were asked for.

    On CPU machines vLLM tells OpenMP so where it starts a process for each rank, and takes its
    own executor without such a process ("uni") for one that has them for want of that.
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if isinstance(vllm_config.parallel_config.distributed_executor_backend, str):
        yield  # one of vLLM's own, on whatever machine
    else:
        with OMPProcessManager(vllm_config).configure_omp_envs(rank=0, local_rank=0):
            yield


def _without_finalizer(async_llm: Any) -> Any:
    """AsyncLLM but for its `__del__`, which fails noisily when the interpreter ends.

    `EngineProcess.close` does its work; without it the kernel does (`die_with_parent`).
    """
    return type("AsyncLLM", (async_llm,), {"__del__": lambda self: None})


def _check_plugin() -> None:
    if not entry_points(group="vllm.general_plugins", name="pdserve"):
        raise ConfigError("pdserve is not installed in this environment: `make install` does it")


def _engine_processes() -> list[psutil.Process]:
    """The processes that vLLM started for the engine: its core and, below it, its workers."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore") and child.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                core = psutil.Process(child.pid)
                found += [core, *core.children(recursive=True)]
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        # psutil compares start times: a process that took over the number is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_SHUTDOWN_S)


def _info(config: VllmEngineConfig, vllm_config: Any) -> EngineInfo:
    cache = vllm_config.cache_config
    return EngineInfo(
        kind="vllm",
        fingerprint=Fingerprint(
            model_revision=config.model_revision,
            kv_dtype=kv_dtype(vllm_config),
            block_size=cache.block_size,
            layout=_layout(vllm_config),
            tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
            pipeline_parallel=vllm_config.parallel_config.pipeline_parallel_size,
            adapters=config.adapters_revision,
        ),
        context_length=vllm_config.model_config.max_model_len,
        # One block stands for no block at all, and nobody gets it.
        kv_capacity_tokens=(cache.num_gpu_blocks - 1) * cache.block_size,
        transports=config.transports,
        weights=_weights(vllm_config.model_config),
        chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_sequences=vllm_config.scheduler_config.max_num_seqs,
        adapters=tuple(config.adapters),
    )


def _weights(model_config: Any) -> str:
    """What they are quantised to, before or while they are loaded; else their type."""
    return model_config.quantization or str(model_config.dtype).removeprefix("torch.")


def _layout(vllm_config: Any) -> str:
    moves = vllm_config.kv_transfer_config is not None
    return block_layout(vllm_config, required_layout(vllm_config) if moves else None)
