"""PURE: which processes `pdserve up` starts, and with which settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import CoordinatorConfig, Listen, ModelConfig, Settings
from pdserve.errors import ConfigError
from pdserve.types import Mode, Role

PREFIX = "PDSERVE_"


@dataclass(frozen=True)
class Pools:
    """How many workers of each role; `cores` of None shares the machine's cores out evenly."""

    prefill: int = 1
    decode: int = 1
    cores: int | None = None


def only_model(settings: Settings) -> ModelConfig:
    """The one model of a configuration. Raises ConfigError when it has several."""
    models = settings.coordinator.models
    if len(models) > 1:
        raise ConfigError(
            f"the configuration has {len(models)} models and only one can be served like this: "
            "list them in a file for pdserve coordinator, and start workers for each one"
        )
    return models[0]


def the_model(settings: Settings, changes: Mapping[str, object], pools: Pools) -> ModelConfig:
    """The model that a system serves: the configured one with `changes`. Raises ConfigError."""
    model = only_model(settings).model_copy(update=changes)
    if settings.worker.engine == "sim" and model.path is None:
        model = model.model_copy(update={"tokenizer": "bytes"})
    if model.mode is not Mode.COLOCATED and pools.prefill == 0:
        raise ConfigError(f"mode {model.mode} needs a prefill worker: --prefill 1 or more")
    return model


def worker_names(pools: Pools) -> list[tuple[str, Role]]:
    """Every worker, prefill workers first."""
    return [
        *((f"prefill-{index}", Role.PREFILL) for index in range(pools.prefill)),
        *((f"decode-{index}", Role.DECODE) for index in range(pools.decode)),
    ]


def share_cores(available: Sequence[int], workers: int, each: int | None) -> list[list[int]]:
    """Cores for each worker: neighbours, in order; shared when there are too few.

    Without `each`, the workers get equal shares and one core is left over for the
    coordinator where there are enough.
    """
    count = min(each or max(1, (len(available) - 1) // workers), len(available))
    sets = [list(available[at : at + count]) for at in range(0, len(available), count)]
    whole = [cores for cores in sets if len(cores) == count]
    return [whole[index % len(whole)] for index in range(workers)]


def core_list(cores: Sequence[int]) -> str:
    """Cores as vLLM reads them: 0-3, or 0,2,5 where they are no range."""
    first, last = cores[0], cores[-1]
    if list(cores) == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}-{last}"
    return ",".join(map(str, cores))


@dataclass(frozen=True)
class WorkerPorts:
    """The ports of a worker; it keeps them over a restart."""

    grpc: int
    metrics: int
    side_channel: int


def worker_settings(
    settings: Settings, worker: tuple[str, Role], model: ModelConfig, cores: str, ports: WorkerPorts
) -> Settings:
    """The settings of one worker, on this machine alone."""
    name, role = worker
    config = settings.worker
    vllm = config.vllm.model_copy(
        update={
            "cpu_cores": config.vllm.cpu_cores or cores,
            "side_channel": Listen(port=ports.side_channel),
        }
    )
    config = config.model_copy(
        update={
            "id": name,
            "roles": frozenset({role}),
            "model": model,
            "grpc": Listen(port=ports.grpc),
            "metrics": Listen(port=ports.metrics),
            "vllm": vllm,
        }
    )
    return _with(settings, worker=config, coordinator=CoordinatorConfig())


def coordinator_settings(
    settings: Settings, model: ModelConfig, workers: list[str], folder: Path
) -> Settings:
    """The settings of the coordinator of these workers; its ledger is in `folder`, where the
    configuration names no other."""
    settings = with_model(settings, model)
    ledger = settings.coordinator.ledger
    if ledger.folder is None:
        ledger = ledger.model_copy(update={"folder": folder.absolute() / "ledger"})
    config = settings.coordinator.model_copy(update={"workers": tuple(workers), "ledger": ledger})
    return _with(settings, coordinator=config)


def with_model(settings: Settings, model: ModelConfig) -> Settings:
    """The settings of a coordinator that serves this model alone."""
    config = settings.coordinator.model_copy(update={"models": (model,)})
    return settings.model_copy(update={"coordinator": config})


def child_env(settings: Settings, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment from which `pdserve.config.load` reads exactly `settings`."""
    sections = settings.model_dump(mode="json")
    names = {PREFIX + section.upper() for section in sections}
    env = {name: value for name, value in base.items() if name.split("__")[0].upper() not in names}
    for section, value in sections.items():
        env[PREFIX + section.upper()] = json.dumps(value)
    return env


def _with(settings: Settings, **sections: object) -> Settings:
    log = settings.log
    if log.format == "auto":
        # A log file of `pdserve up` is read by people.
        log = log.model_copy(update={"format": "console"})
    return settings.model_copy(update={"log": log, **sections})
