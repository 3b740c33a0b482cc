"""`pdserve up`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import (
    ConfigFile,
    Engine,
    Host,
    HttpPort,
    KeysFile,
    KvCache,
    Model,
    ReasoningParser,
    ToolParser,
    TransportName,
    named_model,
    nest,
    parsers,
)
from pdserve.types import Fallback, Mode

if TYPE_CHECKING:
    from cli.report import Reporter

_Prefill = Annotated[int, typer.Option(min=0, metavar="N", help="Number of prefill workers.")]
_Decode = Annotated[int, typer.Option(min=1, metavar="N", help="Number of decode workers.")]
_Mode = Annotated[
    Mode | None, typer.Option(help="How requests are routed.", show_default="colocated")
]
_MinPrefill = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="auto: prompt tokens from which the prefill workers are used.",
        show_default="512",
    ),
]
_Fallback = Annotated[
    Fallback | None,
    typer.Option(
        help="What becomes of a request when no prefill worker can.", show_default="colocate"
    ),
]
_Transport = Annotated[
    TransportName | None,
    typer.Option(help="How KV travels; auto: the best way that was proven.", show_default="auto"),
]
_GrpcPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, metavar="PORT", help="gRPC; 0 picks one.", show_default="50051"),
]
_Cores = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="By default, an equal share of them.")
]
_LogDir = Annotated[Path | None, typer.Option(metavar="DIR", help="By default, a new folder.")]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Shows the logs here, too.")]
_Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines, for programs.")]


def up(  # noqa: PLR0913  (every one is an option)
    *,
    config: ConfigFile = None,
    model: Model = None,
    prefill: _Prefill = 1,
    decode: _Decode = 1,
    engine: Engine = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    mode: _Mode = None,
    min_prefill_tokens: _MinPrefill = None,
    fallback: _Fallback = None,
    transport: _Transport = None,
    host: Host = None,
    port: HttpPort = None,
    grpc_port: _GrpcPort = None,
    cores_per_worker: _Cores = None,
    kv_cache_gib: KvCache = None,
    keys_file: KeysFile = None,
    log_dir: _LogDir = None,
    verbose: _Verbose = False,
    as_json: _Json = False,
) -> None:
    """Runs a whole system on this machine until Ctrl-C."""
    from cli import launch
    from cli.system import Pools
    from pdserve.config import load

    flags = nest(
        [
            ("worker.engine", engine and engine.value),
            ("worker.vllm.cpu_kv_cache_gib", kv_cache_gib),
            ("worker.vllm.transport", transport and transport.value),
            ("worker.sim.transport", transport and transport.value),
            ("coordinator.http.host", host),
            ("coordinator.http.port", port),
            ("coordinator.grpc.host", host),
            ("coordinator.grpc.port", grpc_port),
            ("coordinator.gateway.keys_file", keys_file),
        ]
    )
    choices = {"mode": mode, "min_prefill_tokens": min_prefill_tokens, "fallback": fallback}
    options = launch.UpOptions(
        settings=load(config, flags),
        pools=Pools(prefill, decode, cores_per_worker),
        model=named_model(model)
        | parsers(tool_parser, reasoning_parser)
        | {k: v for k, v in choices.items() if v is not None},
        log_dir=log_dir,
    )
    launch.up(options, _reporter(verbose=verbose, as_json=as_json))


def _reporter(*, verbose: bool, as_json: bool) -> Reporter:
    from cli.report import JsonReporter, PlainReporter

    if as_json:
        return JsonReporter(verbose=verbose)
    if not sys.stdout.isatty():
        return PlainReporter(verbose=verbose)
    from cli.report_rich import RichReporter

    return RichReporter(verbose=verbose)
