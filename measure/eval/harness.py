"""Tasks of lm-eval, run by its own program from whatever environment that is installed in.

It asks with all the requests of a run under one id, so the ledger tells what they cost together;
each answer is given an equal share.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml
from blake3 import blake3

from measure.eval.result import Graded, Result, Run, Way
from measure.eval.run import LEDGER_LAG_S, ledger
from pdserve.errors import ConfigError

_PROGRAM = "lm_eval"


@dataclass(frozen=True, slots=True)
class Tasks:
    """By lm-eval's names; of each at most `limit` questions, from `folder` where it is none of
    lm-eval's own. With a tokenizer, a name or a folder, prompts are written and scored as they
    are; without one they are chats, which tasks that score prompts cannot be."""

    names: tuple[str, ...]
    limit: int | None = None
    tokenizer: str | None = None
    folder: Path | None = None


def run(client: httpx.Client, tasks: Tasks, model: str, ways: Sequence[Way]) -> Result:
    """One way after another. Raises ConfigError where lm-eval is missing, or fails."""
    program = _found()
    began = time.time()
    asked = [(way, f"eval-{uuid.uuid4().hex}") for way in ways]
    samples = [_samples(program, client, tasks, model, way, own) for way, own in asked]
    currency, costs = ledger(client, began - LEDGER_LAG_S)
    runs = tuple(
        Run(way, _priced(graded(found), own, costs))
        for (way, own), found in zip(asked, samples, strict=True)
    )
    at = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    name = f"lm-eval:{','.join(tasks.names)}"
    return Result(name, digest(samples[0]), model, at, currency, runs)


def graded(samples: Iterable[dict[str, Any]]) -> tuple[Graded, ...]:
    """What lm-eval logged of each question, by the first metric of its first filter.

    Raises ConfigError for a metric that does not say whether an answer is right.
    """
    found: dict[str, Graded] = {}
    for sample in samples:
        name = f"{sample['task']}/{sample['doc_id']}"
        if name in found:
            continue
        metric = sample["metrics"][0]
        value = sample[metric]
        if not isinstance(value, int | float):
            raise ConfigError(f"task {sample['task']}: its {metric} is of no single answer")
        text = json.dumps(sample["filtered_resps"], ensure_ascii=False)
        found[name] = Graded(name, "", value >= 1, text)
    return tuple(found.values())


def digest(samples: Iterable[dict[str, Any]]) -> str:
    """Of all that was asked and expected."""
    hashes = ("task", "doc_hash", "prompt_hash", "target_hash")
    asked = {tuple(one[name] for name in hashes) for one in samples}
    return blake3(json.dumps(sorted(asked)).encode()).hexdigest()[:16]


def _found() -> str:
    beside = Path(sys.executable).with_name(_PROGRAM)
    program = shutil.which(_PROGRAM) or (str(beside) if beside.exists() else None)
    if program is None:
        raise ConfigError(
            "lm-eval is not installed: pip install 'lm-eval[api]', best in an environment of its "
            f"own, whose {_PROGRAM} is then to be on the PATH"
        )
    return program


def _samples(
    program: str, client: httpx.Client, tasks: Tasks, model: str, way: Way, request_id: str
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # In a file rather than in arguments, which other users of the machine can see.
        config = Path(folder, "config.yaml")
        headers = {"x-request-id": request_id, **way.headers}
        if key := client.headers.get("authorization"):
            headers["authorization"] = key
        told = _config(tasks, model, str(client.base_url).rstrip("/"), headers)
        config.write_text(yaml.safe_dump({**told, "output_path": folder}), encoding="utf-8")
        ended = subprocess.run(
            (program, "run", "--config", str(config)), capture_output=True, text=True, check=False
        )
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip()).rpartition("\n")[2]
            raise ConfigError(f"lm-eval ended with code {ended.returncode}: {last}")
        # samples_TASK_TIME.jsonl; of a group of tasks, one for each of them.
        found = [
            {**json.loads(line), "task": file.stem.removeprefix("samples_").rpartition("_")[0]}
            for file in sorted(Path(folder).rglob("samples_*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
    if not found:
        raise ConfigError("lm-eval has logged no answer")
    return found


def _config(tasks: Tasks, model: str, url: str, headers: dict[str, str]) -> dict[str, Any]:
    """As lm-eval's own configuration file."""
    chats = tasks.tokenizer is None
    path = "chat/completions" if chats else "completions"
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/{path}",
        "header": headers,
        "tokenizer": tasks.tokenizer,
    }
    told = {
        "model": "local-chat-completions" if chats else "local-completions",
        "model_args": {name: value for name, value in arguments.items() if value is not None},
        "tasks": list(tasks.names),
        "apply_chat_template": chats,
        "log_samples": True,
        "limit": tasks.limit,
        "include_path": None if tasks.folder is None else str(tasks.folder),
    }
    return {name: value for name, value in told.items() if value is not None}


def _priced(
    answers: tuple[Graded, ...], request_id: str, costs: dict[str, float]
) -> tuple[Graded, ...]:
    # A prompt of several in one request has the request's id and its number.
    mine = [cost for found, cost in costs.items() if found.startswith(request_id)]
    share = sum(mine) / len(answers) if mine else None
    return tuple(
        msgspec.structs.replace(answer, request_id=request_id, cost=share) for answer in answers
    )
