"""How each load generator is told what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from measure.peers.figures import Figures, of_guidellm, of_pdserve, of_vllm
from measure.processes import python


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson, requests a second; lengths in tokens, all prompts different."""

    rate: float
    seconds: float
    prompt_tokens: int
    answer_tokens: int

    @property
    def requests(self) -> int:
        return round(self.rate * self.seconds)


@dataclass(frozen=True, slots=True)
class Server:
    """`tokenizer` is the folder of the model's."""

    url: str
    model: str
    tokenizer: Path


_VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Its console script asks for the metadata of another distribution than that for CPUs."""

Program = Callable[[Server, Load, int, Path], tuple[str, ...]]
"""The command that puts the load on the server, from a seed, and writes a file."""


@dataclass(frozen=True, slots=True)
class Generator:
    name: str
    program: Program
    read: Callable[[bytes], Figures]


def _pdserve(server: Server, load: Load, seed: int, file: Path) -> tuple[str, ...]:
    flags = {
        "--target": f"pdserve={server.url}",
        "--model": server.model,
        "--rate": f"{load.rate}/s",
        "--seconds": str(load.seconds),
        "--warm-up": "0",
        "--prompt-tokens": str(load.prompt_tokens),
        "--answer-tokens": str(load.answer_tokens),
        "--seed": str(seed),
        "--json": str(file),
    }
    return python("cli.main", "bench", *_words(flags))


def _vllm(server: Server, load: Load, seed: int, file: Path) -> tuple[str, ...]:
    flags = {
        "--backend": "openai-chat",
        "--base-url": server.url,
        "--endpoint": "/v1/chat/completions",
        "--model": server.model,
        "--tokenizer": str(server.tokenizer),
        "--dataset-name": "random",
        "--random-input-len": str(load.prompt_tokens),
        "--random-output-len": str(load.answer_tokens),
        "--request-rate": str(load.rate),
        "--num-prompts": str(load.requests),
        "--seed": str(seed),
        "--temperature": "0",
        "--result-dir": str(file.parent),
        "--result-filename": file.name,
    }
    program = (sys.executable, "-c", _VLLM_BENCH_SERVE)
    return (*program, *_words(flags), "--ignore-eos", "--save-result", "--disable-tqdm")


def guidellm(environment: Path) -> Generator:
    """As it is installed there."""

    def program(server: Server, load: Load, seed: int, file: Path) -> tuple[str, ...]:
        # Its check of the server asks for a path that is vLLM's alone.
        server_args = f"target={server.url},model={server.model},validate_backend=false"
        lengths = f"prompt_tokens={load.prompt_tokens},output_tokens={load.answer_tokens}"
        flags = {
            "--backend": f"kind=openai_http,{server_args}",
            "--tokenizer": f"kind=huggingface_auto,model={server.tokenizer}",
            "--data": f"kind=synthetic_text,{lengths}",
            "--profile": f"kind=poisson,rate={load.rate}",
            "--constraint": f"kind=max_requests,count={load.requests}",
            "--seed": f"kind=static,value={seed}",
            "--output": f"kind=json,path={file}",
        }
        # By default it has ten processes, which are to share two cores with the server here.
        command = ("env", "GUIDELLM__MAX_WORKER_PROCESSES=1", str(environment / "bin" / "guidellm"))
        return (*command, "run", *_words(flags), "--disable-console")

    return Generator("guidellm", program, of_guidellm)


OURS = Generator("pdserve bench", _pdserve, of_pdserve)
VLLM = Generator("vllm bench serve", _vllm, of_vllm)


def _words(flags: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for pair in flags.items() for word in pair)
