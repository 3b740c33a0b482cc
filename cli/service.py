"""`pdserve coordinator`, `prefill`, `decode`, `worker`: one service in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.failure import CliError
from cli.options import (
    ConfigFile,
    Engine,
    GrpcPort,
    Host,
    HttpPort,
    KeysFile,
    KvCache,
    Model,
    Parent,
    ReasoningParser,
    ToolParser,
    TransportName,
    named_model,
    nest,
    parsers,
)
from pdserve.types import Role

_MetricsPort = Annotated[
    int | None, typer.Option(min=0, max=65535, metavar="PORT", help="0 picks one.")
]
_Id = Annotated[str | None, typer.Option("--id", help="The worker's name.")]
_Transport = Annotated[TransportName | None, typer.Option(help="How KV blocks travel.")]
_Cores = Annotated[str | None, typer.Option(help="Cores of a worker on CPU, for example 0-3.")]
_FleetKey = Annotated[
    Path | None,
    typer.Option("--fleet-key-file", metavar="FILE", help="Key that the whole fleet shares."),
]
_Workers = Annotated[
    list[str] | None, typer.Option("--worker", metavar="HOST:PORT", help="Once for each worker.")
]
_Roles = Annotated[str | None, typer.Option(hidden=True)]


def coordinator(  # noqa: PLR0913  (every one is an option)
    *,
    config: ConfigFile = None,
    host: Host = None,
    port: HttpPort = None,
    grpc_port: GrpcPort = None,
    workers: _Workers = None,
    model: Model = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    keys_file: KeysFile = None,
    fleet_key_file: _FleetKey = None,
    parent: Parent = None,
) -> None:
    """Runs the coordinator, which clients talk to."""
    flags = nest(
        [
            ("coordinator.http.host", host),
            ("coordinator.http.port", port),
            ("coordinator.grpc.host", host),
            ("coordinator.grpc.port", grpc_port),
            ("coordinator.workers", workers or None),
            ("coordinator.gateway.keys_file", keys_file),
            ("fleet.key_file", fleet_key_file),
        ]
    )
    _tie(parent)
    import uvloop

    from cli import system
    from cli.parsers import chat_parser
    from coordinator.main import run_coordinator
    from pdserve.config import load

    settings = load(config, flags)
    changes = named_model(model) | parsers(tool_parser, reasoning_parser)
    if changes:
        named = system.only_model(settings).model_copy(update=changes)
        settings = system.with_model(settings, named)
    uvloop.run(run_coordinator(settings, chat_parser))


def worker(  # noqa: PLR0913  (every one is an option)
    context: typer.Context,
    *,
    config: ConfigFile = None,
    roles: _Roles = None,
    name: _Id = None,
    host: Host = None,
    port: GrpcPort = None,
    metrics_port: _MetricsPort = None,
    model: Model = None,
    reasoning_parser: ReasoningParser = None,
    engine: Engine = None,
    transport: _Transport = None,
    cores: _Cores = None,
    kv_cache_gib: KvCache = None,
    fleet_key_file: _FleetKey = None,
    parent: Parent = None,
) -> None:
    """Runs a worker with --roles prefill,decode."""
    flags = nest(
        [
            ("worker.id", name),
            ("worker.roles", _roles(context.info_name, roles)),
            ("worker.grpc.host", host),
            ("worker.grpc.port", port),
            ("worker.metrics.host", host),
            ("worker.metrics.port", metrics_port),
            *((f"worker.model.{field}", value) for field, value in named_model(model).items()),
            ("worker.model.reasoning_parser", reasoning_parser),
            ("worker.engine", engine and engine.value),
            ("worker.vllm.transport", transport and transport.value),
            ("worker.sim.transport", transport and transport.value),
            ("worker.vllm.cpu_cores", cores),
            ("worker.vllm.cpu_kv_cache_gib", kv_cache_gib),
            ("fleet.key_file", fleet_key_file),
        ]
    )
    _tie(parent)
    from cli.worker import run_worker
    from pdserve.config import load

    asyncio.run(run_worker(load(config, flags)))


def _roles(verb: str | None, roles: str | None) -> list[str] | None:
    """`pdserve prefill` and `pdserve decode` are workers whose role is their name."""
    if verb in set(Role):
        if roles is not None:
            raise CliError(f"pdserve {verb} has one role: use pdserve worker --roles {roles}")
        return [verb]
    return None if roles is None else [role.strip() for role in roles.split(",")]


def _tie(parent: int | None) -> None:
    from pdserve.process import die_with_parent

    if parent is not None:
        die_with_parent(parent)
