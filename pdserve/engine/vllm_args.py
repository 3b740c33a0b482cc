"""Configuration of a vLLM engine: what the user says, checked, and what vLLM is told.

Nothing here starts a process. vLLM is imported late: its logger and its settings read the
environment when they are imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from pdserve.engine.child import ENGINE_MARK
from pdserve.engine.kv import grpc, nixl
from pdserve.engine.kv.transports import TRANSPORTS, transfer_config
from pdserve.engine.vllm_lora import lora_args
from pdserve.errors import ConfigError
from pdserve.types import GrpcDescriptor, NixlDescriptor, Role

_GIB = 2**30
_CPU_BLOCK_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class VllmEngineConfig:
    """A vLLM engine; None leaves a choice to vLLM.

    `model_path` is a folder of safetensors with config and tokenizer; `model_revision` names
    what is in it, and is what two engines compare before they exchange KV blocks.
    `kv_cache_gib` sizes the KV cache; without it `gpu_memory_utilization` (0 to 1) does.
    `cores` is a CPU list as "0" or "0-3,8", one per tensor-parallel rank, joined by "|".
    `reasoning_parser` has structured outputs hold from the end of the model's reasoning on.
    `block_size` is in tokens, on CPU a multiple of 32. `max_num_batched_tokens` bounds a step,
    and with it how long a cancellation takes and how long decodes wait for a chunk of a prompt.
    `transports` let the engine hand prompts over as `roles` say, the best first. It listens on
    `side_channel_host`, which decode engines must reach: for NIXL on `side_channel_port`, for
    gRPC on `grpc_port` and, with tensor parallelism, those after it; 0 picks free ones.
    `adapters` are folders of LoRA adapters by their names, `adapters_revision` names what is in
    them. `fleet_key_file` holds the key that readers over gRPC must carry. `kv_lease_s` is in whole
    seconds. `log_level` is that of vLLM's own log; below it, and always unless it is "DEBUG",
    tracebacks are cut to a line. `extra_engine_args` are passed to vLLM's AsyncEngineArgs as
    they are and win over everything here.
    """

    model_path: Path
    model_revision: str
    roles: frozenset[Role] = frozenset({Role.PREFILL, Role.DECODE})
    dtype: str = "auto"
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    cores: str | None = None
    max_model_len: int | None = None
    reasoning_parser: str | None = None
    block_size: int = 32
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 64
    enforce_eager: bool = False
    quantization: str | None = None
    tensor_parallel: int = 1
    transports: tuple[str, ...] = TRANSPORTS
    kv_lease_s: int = 30
    transfer_timeout_s: float = 60.0
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    grpc_port: int = 0
    fleet_key_file: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    adapters_revision: str = ""
    log_level: str = "WARNING"
    extra_engine_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def check_config(config: VllmEngineConfig) -> None:
    """Refuses, in a moment, what vLLM would take long to refuse or never would.

    Raises ConfigError.
    """
    if not (config.model_path / "config.json").is_file():
        raise ConfigError(f"no model at {config.model_path}: it has no config.json")
    if not config.roles:
        raise ConfigError("an engine needs a role: prefill, decode or both")
    if unknown := set(config.transports) - set(TRANSPORTS):
        raise ConfigError(f"unknown KV transport {unknown.pop()!r}: use {' or '.join(TRANSPORTS)}")
    if config.kv_lease_s < nixl.MIN_LEASE_S:
        raise ConfigError(f"a KV lease of {config.kv_lease_s} s is too short: {nixl.MIN_LEASE_S} s")
    if config.block_size < 1:
        raise ConfigError(f"block size {config.block_size} is not positive")
    lora_args(config.adapters)
    if config.cores is not None:
        _check_cores(config.cores, config.tensor_parallel)
    if NixlDescriptor.transport in config.transports:
        _check_port(config.side_channel_host, config.side_channel_port)
    if GrpcDescriptor.transport in config.transports:
        _check_port(config.side_channel_host, config.grpc_port)


def check_cpu(config: VllmEngineConfig) -> None:
    """Refuses what only engines on CPU cannot do. Raises ConfigError."""
    if config.block_size % _CPU_BLOCK_MULTIPLE:
        raise ConfigError(
            f"block size {config.block_size} does not work on CPU: "
            f"use a multiple of {_CPU_BLOCK_MULTIPLE}"
        )
    weights = sum(file.stat().st_size for file in config.model_path.glob("*.safetensors"))
    needed = weights + (config.kv_cache_gib or 0) * _GIB * config.tensor_parallel
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"not enough memory: weights and KV cache need {needed / _GIB:.1f} GiB, "
            f"{available / _GIB:.1f} GiB are free; lower kv_cache_gib"
        )


def _check_cores(cores: str, ranks: int) -> None:
    lists = cores.split("|")
    if len(lists) != ranks:
        raise ConfigError(f"cores {cores!r} name {len(lists)} lists for {ranks} ranks")
    try:
        asked = {core for part in lists for core in _parse_cores(part)}
    except ValueError:
        raise ConfigError(f"cores {cores!r} are not a list such as 0-3,8") from None
    if missing := asked - os.sched_getaffinity(0):
        raise ConfigError(f"cores {cores!r}: this process may not use core {min(missing)}")


def _parse_cores(text: str) -> set[int]:
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _check_port(host: str, port: int) -> None:
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"side channel host {host!r} names no machine: give the address of this one"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"side channel {host}:{port} cannot be listened on: {error.strerror}"
            ) from error


def set_environment(config: VllmEngineConfig, folder: Path) -> None:
    """Sets the environment that vLLM reads, in this process and those that it starts.

    The only place that does. What the user has set stays, except for what `config` says.
    Must run before vLLM is imported for the first time.
    """
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": config.log_level.upper(),
        # A forked engine would skip the plugins, for its parent has loaded them already.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # As vLLM sets it itself when NIXL is imported after it (its nixl_utils.py).
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    if config.log_level.upper() != "DEBUG":
        defaults |= {
            "UCX_LOG_LEVEL": "fatal",
            "NIXL_LOG_LEVEL": "ERROR",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ[ENGINE_MARK] = str(folder)
    if config.cores is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.cores


def set_cpu_environment() -> None:
    """The part of it that holds on CPU machines only: UCX would look for RDMA devices."""
    os.environ.setdefault("UCX_TLS", "tcp,shm,self")


def engine_args(config: VllmEngineConfig, epoch: str, cache_events: str) -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs, but for the classes of those that are mappings.

    `epoch` is this start's, as in `grpc_config`; `cache_events` is where what the prefix cache
    gains and loses is to be told.
    """
    args: dict[str, Any] = {
        "model": str(config.model_path),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        # What each step did and how long it took, in the statistics that it makes anyway.
        "enable_logging_iteration_details": True,
        # Requests say all of their sampling; the model's folder must not add to it.
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": cache_events,
        },
    }
    if config.reasoning_parser is not None:
        args["reasoning_parser"] = config.reasoning_parser
    args |= lora_args(config.adapters)
    if config.kv_cache_gib is not None:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * _GIB)
    elif config.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.transports:
        extras = {
            NixlDescriptor.transport: nixl.extra_config(nixl_config(config)),
            GrpcDescriptor.transport: grpc.extra_config(grpc_config(config, epoch)),
        }
        own = {name: extras[name] for name in config.transports}
        args["kv_transfer_config"] = transfer_config(config.roles, own)
    return args | dict(config.extra_engine_args)


def nixl_config(config: VllmEngineConfig) -> nixl.NixlConfig:
    return nixl.NixlConfig(
        model_revision=config.model_revision,
        host=config.side_channel_host,
        port=config.side_channel_port,
        lease_s=config.kv_lease_s,
        transfer_timeout_s=config.transfer_timeout_s,
    )


def grpc_config(config: VllmEngineConfig, epoch: str) -> grpc.GrpcConfig:
    return grpc.GrpcConfig(
        host=config.side_channel_host,
        epoch=epoch,
        port=config.grpc_port,
        timeout_s=config.transfer_timeout_s,
        key_file=config.fleet_key_file,
    )
