"""The coordinator as a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL


@dataclass
class Running:
    """`events` are the JSON lines that it has printed so far."""

    process: Process
    events: list[dict[str, Any]]

    async def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            while line := await self.process.stdout.readline():
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return self.events[-1]
        raise AssertionError(f"ended without {event!r}: {self.events}")


@asynccontextmanager
async def coordinator(
    folder: Path, workers: Sequence[str], *, name: str = "coordinator", **fields: Any
) -> AsyncIterator[Running]:
    """`workers` and `fields` are those of its configuration; it is killed in the end."""
    config = {
        "coordinator": {
            "http": {"port": 0},
            "grpc": {"port": 0},
            "workers": list(workers),
            "models": [{"name": MODEL, "tokenizer": "bytes"}],
            **fields,
        }
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / f"{name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cli.main", "coordinator", "--config", str(path)),
            stdout=PIPE,
            stderr=log,
        )
    try:
        yield Running(process, [])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
