"""vLLM's own API server in one process, on the model that the fleet serves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from pdserve import models
from tests.support.patience import eventually

START_S = 400.0
TOOL_PARSER = "hermes"
"""Of either server; the model, too small to call tools of itself, follows any form."""


@contextmanager
def vllm_server(model: str) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = str(models.resolve(models.DEFAULT_MODEL, print))
    flags = {
        "--model": folder,
        "--served-model-name": model,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--block-size": "32",
        "--tool-call-parser": TOOL_PARSER,
    }
    arguments = [part for flag in flags.items() for part in flag]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--enforce-eager", "--enable-auto-tool-choice", *arguments),
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _await_health(client, process)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_health(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    def healthy() -> bool:
        assert process.poll() is None, "vLLM's API server has ended"
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    assert eventually(healthy, START_S, 0.5), f"vLLM's API server is not there after {START_S} s"
