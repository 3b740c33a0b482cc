"""`make sdks`: other people's clients, unmodified, against a whole system, on both routes.

Each is a process in an environment of its own, `.sdks`. Exit status 1 where one fails, or has
other answers on one route than on the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pdserve.models import DEFAULT_MODEL, resolve
from tests.support.running_system import Event, RunningSystem, log_text, sample

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".sdks"
PYTHON = str(ENVIRONMENT / "bin" / "python")
MODES = ("colocated", "disaggregated")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Client:
    """A script that is given how to ask as JSON, and prints its answers as JSON in its last line.

    `reads_prompts` is set where some of its requests are for the log probabilities of prompts,
    which are always read colocated.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    reads_prompts: bool = False


CLIENTS = (
    Client("openai for Node", ("node", "openai_node.cjs")),
    Client("LangChain ChatOpenAI", (PYTHON, "langchain_chat.py")),
    Client(
        "lm-eval local-completions",
        (PYTHON, "lm_eval_backend.py"),
        (("backend", "local-completions"),),
        reads_prompts=True,
    ),
    Client(
        "lm-eval local-chat-completions",
        (PYTHON, "lm_eval_backend.py"),
        (("backend", "local-chat-completions"),),
    ),
    Client("pdserve eval lm-eval:TASK", (sys.executable, "pdserve_eval.py")),
)


class System:
    """A running system, and how many answers it gave by each route."""

    def __init__(self, engine: str, folder: Path, ready: Event) -> None:
        self.asked = {
            "base_url": f"http://{ready['http']}",
            "model": ready["model"],
            "engine": engine,
            "tokenizer": str(folder),
        }

    def answered(self) -> dict[str, int]:
        text = httpx.get(f"{self.asked['base_url']}/metrics").text
        ok = ({"mode": mode, "outcome": "ok"} for mode in MODES)
        return {each["mode"]: int(sample(text, "pdserve_requests_total", each)) for each in ok}


class ClientFailedError(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    engine = parser.parse_args().engine
    folder = resolve(DEFAULT_MODEL, print)
    flags = ("--engine", engine, "--model", str(folder), "--port", "0", "--grpc-port", "0")
    running = RunningSystem(*flags)
    try:
        ready = running.wait_for("ready")
        system = System(engine, folder, ready)
        failed = [client.name for client in CLIENTS if not passes(system, client)]
        if failed:
            print(log_text(ready)[-4000:], file=sys.stderr)
    finally:
        running.stop()
    return 1 if failed else 0


def passes(system: System, client: Client) -> bool:
    """Prints a line for each route."""
    answers: list[Any] = []
    for mode in MODES:
        try:
            told, line = run(system, client, mode)
        except ClientFailedError as error:
            print(f"{client.name:32} {mode:14} FAILED\n{error}", flush=True)
            return False
        answers.append(told)
        if told != answers[0]:
            was, now = (json.dumps(each, indent=1) for each in answers)
            print(f"{client.name:32} {mode:14} FAILED: other answers\n{was}\n{now}", flush=True)
            return False
        print(f"{client.name:32} {mode:14} ok  {line}", flush=True)
    return True


def run(system: System, client: Client, mode: str) -> tuple[Any, str]:
    """All answers of one run, and what to say of it. Raises ClientFailedError."""
    before, start = system.answered(), time.monotonic()
    asked = {**system.asked, "mode": mode, **dict(client.options)}
    with tempfile.TemporaryDirectory() as caches:
        done = subprocess.run(
            (*client.command, json.dumps(asked)),
            cwd=HERE,
            env=environment(caches),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    took = time.monotonic() - start
    if done.returncode:
        raise ClientFailedError((done.stdout + done.stderr)[-4000:])
    told = json.loads(done.stdout.splitlines()[-1])
    by_route = {route: count - before[route] for route, count in system.answered().items()}
    others = sum(count for route, count in by_route.items() if route != mode)
    if not by_route[mode] or (others and not (client.reads_prompts and by_route["colocated"])):
        raise ClientFailedError(f"answers by route: {by_route}")
    counts = ", ".join(f"{count} {route}" for route, count in by_route.items() if count)
    return told["answers"], f"{took:5.1f} s; {counts}; {told['versions']}{told.get('figures', '')}"


def environment(caches: str) -> dict[str, str]:
    """No client looks for anything on the network, or leaves something behind."""
    own = {
        "HF_HOME": caches,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LANGSMITH_TRACING": "false",
        "NODE_PATH": str(ENVIRONMENT / "node_modules"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | own


if __name__ == "__main__":
    sys.exit(main())
