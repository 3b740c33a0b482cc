"""Options that several verbs share, and how flags become settings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.targets import ITL_S, TTFT_S

DEFAULT_URL = "http://127.0.0.1:8000"


class EngineName(StrEnum):
    VLLM = "vllm"
    SIM = "sim"


class TransportName(StrEnum):
    AUTO = "auto"
    NIXL = "nixl"
    GRPC = "grpc"
    NONE = "none"


class ModelName(StrEnum):
    """Shapes of `measure.simulation.roofline`, and GPUs and precisions below."""

    LLAMA_8B = "llama-3.1-8b"
    LLAMA_70B = "llama-3.1-70b"


class GpuName(StrEnum):
    A100 = "a100"
    H100 = "h100"
    H200 = "h200"
    L40S = "l40s"


class PrecisionName(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file of settings.")
]
URL_VARIABLE = "PDSERVE_URL"
Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the coordinator listens.")]
Key = Annotated[
    str | None, typer.Option("--key", envvar="PDSERVE_KEY", help="API key, where keys are used.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH",
        help="The default model's name, or a model's folder.",
        show_default="smollm2-135m-instruct",
    ),
]
Engine = Annotated[
    EngineName | None,
    typer.Option(help="vllm runs a model; sim only takes its time.", show_default="vllm"),
]
ToolParser = Annotated[
    str | None, typer.Option(metavar="NAME", help="vLLM's parser of the model's calls of tools.")
]
ReasoningParser = Annotated[
    str | None, typer.Option(metavar="NAME", help="vLLM's parser of the model's reasoning.")
]
HttpPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, metavar="PORT", help="HTTP; 0 picks one.", show_default="8000"),
]
GrpcPort = Annotated[
    int | None, typer.Option(min=0, max=65535, metavar="PORT", help="gRPC; 0 picks one.")
]
KvCache = Annotated[
    float | None,
    typer.Option(
        "--kv-cache-gib",
        min=0.01,
        metavar="GIB",
        help="KV cache of a worker on CPU.",
        show_default="1.0",
    ),
]
KeysFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="API keys; without, everybody may call.")
]
TTFT_P99, ITL_P99 = f"{TTFT_S:g}s", f"{ITL_S * 1000:g}ms"
"""Defaults of these two."""
TtftP99 = Annotated[str, typer.Option(metavar="TIME", help="SLO of the first token.")]
ItlP99 = Annotated[str, typer.Option(metavar="TIME", help="SLO of each token after it.")]
Ttft = Annotated[float, typer.Option(min=0.001, help="Target of the first token, in seconds.")]
Tpot = Annotated[float, typer.Option(min=0.001, help="Target of each token after it, in seconds.")]
MAX_PRICE = 1_000_000
GpuHour = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MAX_PRICE,
        metavar="PRICE",
        help="Of a GPU for an hour.",
        show_default="as configured, else hours are told",
    ),
]
Parent = Annotated[
    int | None, typer.Option(hidden=True, help="Process id to die with, if it is the parent.")
]


def nest(flags: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Flags as `pdserve.config.load` takes them, from dotted names; None is not given."""
    nested: dict[str, Any] = {}
    for name, value in flags:
        if value is None:
            continue
        *sections, field = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    return nested


def parsers(tool: str | None, reasoning: str | None) -> dict[str, str]:
    """Fields of a model's configuration from --tool-parser and --reasoning-parser."""
    given = {"tool_parser": tool, "reasoning_parser": reasoning}
    return {name: value for name, value in given.items() if value is not None}


def named_model(source: str | None) -> dict[str, str]:
    """Fields of a model's configuration from what --model says: a name, or a folder."""
    if source is None:
        return {}
    if os.sep in source or Path(source).is_dir():
        path = Path(source).resolve()
        return {"name": path.name, "path": str(path)}
    return {"name": source}
