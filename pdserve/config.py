"""Configuration: one YAML file, then the environment, then flags, each overruling the last.

Each process builds one frozen `Settings` at start and prints it once. Variables are named
PDSERVE_SECTION__FIELD, for example PDSERVE_COORDINATOR__HTTP__PORT=9000.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from pydantic_settings.exceptions import SettingsError

from pdserve.config_experiment import Experiment
from pdserve.config_ledger import LedgerConfig, Prices
from pdserve.errors import ConfigError
from pdserve.section import Name, in_words
from pdserve.section import Section as _Section
from pdserve.sources import parse_source
from pdserve.targets import ITL_S, TTFT_S
from pdserve.tracing_config import TracingConfig
from pdserve.types import Fallback, Mode, Role

Port = Annotated[int, Field(ge=0, le=65535, description="0 picks a free port")]
TransportChoice = Literal["auto", "nixl", "grpc", "none"]
LOOPBACK = "127.0.0.1"
_PREFIX = "PDSERVE_"


class Listen(_Section):
    """An address to listen on; port 0 picks a free one."""

    host: str = LOOPBACK
    port: Port = 0

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ElasticConfig(_Section):
    """When workers that host both services move between reading prompts, writing, and both."""

    prefill_tokens: int = Field(
        default=4096, ge=1, description="prompt tokens waiting to be read, a worker, that are many"
    )
    sequences: int = Field(
        default=32, ge=1, description="answers being written, a worker, that are many"
    )
    dwell_s: float = Field(default=30.0, gt=0, description="shortest time between two moves")


class ModelConfig(_Section):
    """One served model: its name to clients, its files, and how its requests are routed."""

    name: Name = "smollm2-135m-instruct"
    path: str | None = Field(
        default=None, description="folder of the model; the tokenizer is read from it"
    )
    tokenizer: Literal["model", "bytes"] = Field(
        default="model", description="'bytes' needs no folder; for simulated workers"
    )
    mode: Mode = Mode.COLOCATED
    decider: Literal["threshold", "estimate"] = Field(
        default="estimate",
        description="auto: by what both routes are estimated to take, and by the prompt's length "
        "until that is learnt; or by the length alone",
    )
    min_prefill_tokens: int = Field(
        default=512,
        ge=1,
        description="auto, by length: uncached prompt tokens from which the prefill pool is used",
    )
    prefill_balance: str = Field(
        default="prefix-aware",
        description="which prefill worker: prefix-aware, least-outstanding, power-of-two, "
        "round-robin",
    )
    decode_balance: str = Field(default="prefix-aware", description="which decode worker; as above")
    ttft_target_s: float = Field(
        default=TTFT_S, gt=0, description="time to the first token that estimates weigh waiting by"
    )
    ttft_target_token_s: float = Field(
        default=0.0,
        ge=0,
        description="so much later the first token may come for each prompt token: whoever sends "
        "much expects to wait",
    )
    itl_target_s: float = Field(
        default=ITL_S, gt=0, description="time between tokens that estimates weigh harm by"
    )
    fallback: Fallback = Fallback.COLOCATE
    transport: Literal["auto", "nixl", "grpc"] = Field(
        default="auto", description="KV transport of hand-offs; auto: the best that was proven"
    )
    mixed_precision: bool = Field(
        default=False,
        description="the pools' weights may differ in precision: where they do, a hand-off is "
        "proven by an answer, not by an equal one",
    )
    max_recoveries: int = Field(
        default=2,
        ge=0,
        description="how often an answer that its decode worker cuts off is continued on "
        "another one; 0: it ends with the error",
    )
    recovery_wait_s: float = Field(
        default=6.0,
        ge=0,
        description="how long a request whose decode worker was lost waits for another one",
    )
    tool_parser: Name | None = Field(
        default=None,
        description="finds calls of tools in answers: by its name in vLLM, which must be "
        "installed with the coordinator, too; none: no tool is ever called",
    )
    reasoning_parser: Name | None = Field(
        default=None,
        description="tells what the model thought from what it answers; as above",
    )
    lora: dict[Name, str] = Field(
        default={}, description="LoRA adapters, each served as a model of its name: their folders"
    )
    mode_override: bool = Field(default=True, description="whether a request may ask for a mode")
    elastic: ElasticConfig | None = Field(
        default=None,
        description="when workers that host both services move between the pools; none: never",
    )
    prices: Prices = Prices()
    max_ttft_s: float = Field(
        default=60.0,
        gt=0,
        description="a request without a deadline that would wait so long for its first token "
        "is refused at once",
    )


class GatewayConfig(_Section):
    """Who may call, how often, and how much at once."""

    keys_file: Path | None = Field(default=None, description="file of hashed API keys; none: open")
    allow_anonymous: bool = Field(
        default=False, description="serve beyond loopback without keys; the network must be trusted"
    )
    rate: str | None = Field(
        default=None, description="requests for each key, for example '600/minute'"
    )
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    max_running: int | None = Field(
        default=None,
        ge=1,
        description="requests at work at once, per model; none: as many as the workers hold",
    )
    max_queued: int = Field(
        default=1024, ge=0, description="requests waiting for a place, per model"
    )


class FleetConfig(_Section):
    """How coordinator and workers trust each other.

    `key_file` holds the shared key that every call between them must carry. A worker
    beyond loopback refuses to start without it, unless `allow_anonymous`.
    """

    key_file: Path | None = None
    allow_anonymous: bool = False


class CoordinatorConfig(_Section):
    """The one process that clients talk to."""

    http: Listen = Listen(port=8000)
    grpc: Listen = Listen(port=50051)
    workers: tuple[str, ...] = Field(
        default=(),
        description="where workers are found: host:port, dns:NAME:PORT for every address of a "
        "name, file:PATH for a watched YAML list of host:port",
    )
    models: tuple[ModelConfig, ...] = Field(default=(ModelConfig(),), min_length=1)
    experiments: tuple[Experiment, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    ledger: LedgerConfig = LedgerConfig()
    quarantine_after: int = Field(
        default=3,
        ge=1,
        description="failed hand-offs in a row, between two workers by one transport, after "
        "which these get no more of them until a probe goes through; requests, for a worker",
    )
    silence_s: float = Field(
        default=5.0,
        ge=3,
        le=8,
        description="a worker of which nothing has been heard for so long is lost, and its "
        "streams are ended; after 2 s it gets nothing new",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="how long SIGTERM waits for running requests"
    )
    notice_s: float = Field(
        default=0.0,
        ge=0,
        description="how long after SIGTERM it still takes requests while it says that it is not "
        "ready: for load balancers that ask",
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        for worker in workers:
            parse_source(worker)
        return workers

    @model_validator(mode="after")
    def _check(self) -> CoordinatorConfig:
        names = [model.name for model in self.models]
        served = [*names, *(adapter for model in self.models for adapter in model.lora)]
        if len(set(served)) != len(served):
            raise ValueError("two models, or adapters, share a name")
        for experiment in self.experiments:
            if experiment.model not in names:
                raise ValueError(f"experiment {experiment.name}: no model {experiment.model!r}")
        if len({experiment.model for experiment in self.experiments}) != len(self.experiments):
            raise ValueError("a model has two experiments")
        return self


class VllmConfig(_Section):
    """The vLLM engine of a worker; a value of None leaves the choice to vLLM."""

    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    block_size: int | None = Field(default=None, ge=1, description="tokens a KV block")
    chunk_tokens: int = Field(default=256, ge=16, description="prompt tokens read in one step")
    max_num_seqs: int = Field(default=64, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    cpu_kv_cache_gib: float = Field(default=1.0, gt=0, description="KV cache of a worker on CPU")
    cpu_cores: str | None = Field(
        default=None, description="cores of a worker on CPU, for example '0-3'"
    )
    enforce_eager: bool = True
    transport: TransportChoice = Field(
        default="auto", description="KV transports that the worker offers; auto: all of them"
    )
    side_channel: Listen = Field(
        default=Listen(), description="where KV is handed over: its port is NIXL's"
    )
    grpc_port: Port = Field(
        default=0,
        description="KV over gRPC, on the side channel's host; the ranks of tensor parallelism "
        "take those after it",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    extra_args: dict[str, Any] = Field(default={}, description="further arguments of vLLM's engine")


class SimConfig(_Section):
    """The simulated engine: how long its steps take, in seconds."""

    weights: Name = Field(default="bfloat16", description="precision that it says it has")
    prefill_token_s: float = Field(default=0.0002, ge=0)
    decode_step_s: float = Field(default=0.02, ge=0)
    decode_sequence_s: float = Field(default=0.0, ge=0, description="added to a step per sequence")
    transfer_token_s: float = Field(default=0.000002, ge=0)
    kv_bytes_per_token: int = Field(default=23_040, ge=1)
    kv_capacity_tokens: int = Field(default=262_144, ge=1)
    context_length: int = Field(default=8_192, ge=1)
    chunk_tokens: int = Field(default=256, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    side_channel: Listen = Listen()
    transport: TransportChoice = Field(
        default="auto", description="KV transports that the worker offers; auto: all of them"
    )


class WorkerConfig(_Section):
    """One worker process; a role is a service that it hosts on its engine."""

    id: Name = "worker-0"
    roles: frozenset[Role] = Field(default=frozenset({Role.DECODE}), min_length=1)
    model: ModelConfig = ModelConfig()
    engine: Literal["vllm", "sim"] = "vllm"
    grpc: Listen = Listen()
    metrics: Listen = Listen()
    lease_s: float = Field(default=30.0, gt=0, description="how long exported KV is held unfetched")
    drain_s: float = Field(
        default=30.0, ge=0, description="how long SIGTERM waits for running work"
    )
    vllm: VllmConfig = VllmConfig()
    sim: SimConfig = SimConfig()


class LogConfig(_Section):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console on a terminal, else JSON lines"
    )


class Settings(BaseSettings):
    """The effective configuration of one process."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    coordinator: CoordinatorConfig = CoordinatorConfig()
    worker: WorkerConfig = WorkerConfig()
    fleet: FleetConfig = FleetConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


def load(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Reads the file, the environment and `flags` (nested as the sections are).

    Raises ConfigError with one line that names the field at fault.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"no configuration file at {path}")

    class _FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=path)

    try:
        return _FromFile(**flags)
    except ValidationError as error:
        raise ConfigError(f"configuration: {in_words(error)}; see `pdserve config`") from None
    except SettingsError:  # of a variable, which it does not name
        raise ConfigError(
            f"configuration: {' or '.join(_variables())}: a section or a list must be JSON"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration: {' '.join(str(error).split())}") from None
    except ValueError:  # of dict(), which the file's content is put through
        raise ConfigError(f"configuration: {path} does not hold sections, `name: value`") from None


def _variables() -> list[str]:
    """Those of the environment that hold settings."""
    sections = tuple(f"{_PREFIX}{name}".upper() for name in Settings.model_fields)
    return sorted(name for name in os.environ if name.upper().split("__")[0] in sections)


def dump(settings: Settings) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
