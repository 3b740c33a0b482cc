"""Kills coordinators under load, one after another on one ledger, and audits what is left.

Who audits reads the files and the database by itself. After each kill it notes what was
settled; in the end each note, and each answer whose end a client has read, must be there
exactly once, with the very tokens that the client was told.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import psycopg

from cli import ports
from pdserve.config import SimConfig
from pdserve.types import Role
from tests.ledger.child import coordinator
from tests.support.patience import WITHIN_S, happens
from tests.support.sim_fleet import MODEL, SimFleetWorker

SIM = SimConfig(prefill_token_s=0.0, decode_step_s=0.002, transfer_token_s=0.0)
CLIENTS = 8
LONGEST_LIFE_S = 1.0
"""A coordinator is killed at a random moment before that, counted from its first answer."""
GONE_FOR_S = 0.02
"""A client that is refused comes again so much later."""

Entry = tuple[str, str, int, int]
"""Charge id, request id, prompt and answer tokens."""


@dataclass
class Audit:
    """`told` are the answers that clients have read to their end: tokens by request id."""

    kills: int = 0
    asked: int = 0
    told: dict[str, tuple[int, int]] = field(default_factory=dict)
    settled: set[Entry] = field(default_factory=set)
    left_to_post: int = 0
    posted: list[Entry] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What must not be, in words."""
        charges = Counter(charge_id for charge_id, *_ in self.posted)
        requests = Counter(request_id for _, request_id, *_ in self.posted)
        used = {request_id: (prompt, answer) for _, request_id, prompt, answer in self.posted}
        return [
            *(f"charge {each} is there {n} times" for each, n in charges.items() if n > 1),
            *(f"request {each} was charged {n} times" for each, n in requests.items() if n > 1),
            *(f"settled and lost: {entry}" for entry in self.settled - set(self.posted)),
            *(
                f"told {tokens} to {each}, charged {used.get(each)}"
                for each, tokens in self.told.items()
                if used.get(each) != tokens
            ),
        ]


class Killing:
    """One ledger, and the coordinators that live and die on it."""

    def __init__(self, folder: Path, url: str | None, seed: int) -> None:
        self.audit = Audit()
        self._folder = folder
        self._url = url
        self._random = random.Random(seed)
        self._numbers = count()
        self._answered = asyncio.Event()
        http, grpc = ports.pick(2)
        self._base = f"http://127.0.0.1:{http}"
        self._ports = {"http": {"port": http}, "grpc": {"port": grpc}}
        self._processes = get_context("forkserver")
        self._processes.set_forkserver_preload([coordinator.__module__])

    async def run(self, kills: int) -> Audit:
        async with (
            _workers() as workers,
            httpx.AsyncClient(base_url=self._base, trust_env=False, timeout=WITHIN_S) as client,
        ):
            clients = [asyncio.create_task(self._ask_on(client)) for _ in range(CLIENTS)]
            try:
                for _ in range(kills):
                    await self._one_life(workers)
            finally:
                for each in clients:
                    each.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
            await self._last_life(workers)
        self.audit.posted = self._posted()
        return self.audit

    async def _one_life(self, workers: list[str]) -> None:
        process = self._start(workers)
        try:
            self._answered.clear()
            async with asyncio.timeout(WITHIN_S):
                await self._answered.wait()
            await asyncio.sleep(self._random.uniform(0, LONGEST_LIFE_S))
        finally:
            await _end(process, signal.SIGKILL)
        self.audit.kills += 1
        left = set(_journal(self._folder))
        self.audit.left_to_post += len(left)
        self.audit.settled |= left | set(self._posted())

    async def _last_life(self, workers: list[str]) -> None:
        """One that ends as it should, and leaves nothing to post."""
        process = self._start(workers)
        try:
            async with httpx.AsyncClient(
                base_url=self._base, trust_env=False, timeout=WITHIN_S
            ) as client:
                assert await happens(lambda: self._asked(client, "last"), WITHIN_S, GONE_FOR_S)
        finally:
            await _end(process, signal.SIGTERM)
        assert not list(_journal(self._folder))

    def _start(self, workers: list[str]) -> BaseProcess:
        ledger = {"folder": str(self._folder), "url": self._url}
        config = {
            "coordinator": {
                **self._ports,
                "workers": workers,
                "models": [{"name": MODEL, "tokenizer": "bytes", "prices": {"decode": 1}}],
                "ledger": ledger,
            },
            "log": {"format": "json"},
        }
        told = self._folder / "coordinator.log"
        process = self._processes.Process(target=coordinator, args=(config, told), daemon=True)
        process.start()
        return process

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while True:
            if await self._asked(client, f"r{next(self._numbers)}"):
                self._answered.set()
            else:
                await asyncio.sleep(GONE_FOR_S)

    async def _asked(self, client: httpx.AsyncClient, name: str) -> bool:
        """Whether the end of an answer came; then it is noted."""
        self.audit.asked += 1
        stream = self._random.random() < 0.5
        body = {
            "model": MODEL,
            "prompt": "x" * self._random.randint(1, 200),
            "max_tokens": self._random.randint(1, 30),
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        mode = self._random.choice(("colocated", "disaggregated"))
        headers = {"x-request-id": name, "x-pdserve-mode": mode}
        try:
            response = await client.post("/v1/completions", json=body, headers=headers)
        except httpx.TransportError:
            return False
        if response.status_code != 200:
            return False
        text = response.text
        if stream:
            *_, last, done = [line for line in text.splitlines() if line]
            if done != "data: [DONE]":
                return False
            text = last.removeprefix("data: ")
        usage = json.loads(text)["usage"]
        self.audit.told[name] = usage["prompt_tokens"], usage["completion_tokens"]
        return True

    def _posted(self) -> list[Entry]:
        query = (
            "SELECT charge_id, request_id, prompt_tokens, completion_tokens FROM pdserve_charges"
        )
        if self._url is not None:
            with psycopg.connect(self._url) as server:
                exists = server.execute("SELECT to_regclass('pdserve_charges')").fetchone()
                return server.execute(query).fetchall() if exists != (None,) else []  # type: ignore[arg-type]
        file = self._folder / "ledger.sqlite3"
        with closing(sqlite3.connect(file)) as connection:
            made = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'pdserve_charges'")
            return connection.execute(query).fetchall() if made.fetchone() else []


def _journal(folder: Path) -> Iterator[Entry]:
    for file in (folder / "journal").glob("*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                it: dict[str, Any] = json.loads(line)
                yield (
                    it["charge_id"],
                    it["request_id"],
                    it["prompt_tokens"],
                    it["completion_tokens"],
                )


async def _end(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)
    await asyncio.to_thread(process.join)
    process.close()


@asynccontextmanager
async def _workers() -> AsyncIterator[list[str]]:
    workers = [
        SimFleetWorker("p", Role.PREFILL, sim=SIM),
        SimFleetWorker("d", Role.DECODE, sim=SIM),
    ]
    try:
        yield [(await worker.start()).address for worker in workers]
    finally:
        for worker in workers:
            await worker.kill()
