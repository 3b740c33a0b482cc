"""The process that copies and times. `python -m measure.kv_transfer.reader JOB_JSON`

Prints each copy as a JSON line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from typing import Any

import msgspec

from measure.cpu import process_cpu_s
from measure.kv_transfer.cache import Cache, used_blocks
from measure.kv_transfer.jobs import Copied, Job, Way, num_blocks
from measure.kv_transfer.over_grpc import GrpcLink
from measure.kv_transfer.over_nixl import NixlLink
from measure.kv_transfer.plain import MemcpyLink, SocketLink
from measure.kv_transfer.ways import HOLDER, READER, Link, Prompt, WayError

_MARKED = (Way.GRPC, Way.NIXL_SHM, Way.NIXL_TCP)
"""The ways that copy blocks; the others copy as many bytes."""


def main(job_json: str) -> None:
    job = msgspec.json.decode(job_json, type=Job)
    with Client(job.holder, family="AF_UNIX") as holder:
        reader = _Reader(job, holder)
        for _ in range(job.repeats):
            for way in job.ways:
                with reader.open(way) as link:
                    reader.copy(way, link, job.num_tokens[0])  # the first opens connections
                    for num_tokens in job.num_tokens:
                        _tell(reader.copy(way, link, num_tokens))
            if job.paced_tokens:
                with reader.open(Way.GRPC) as link:
                    reader.copy(Way.GRPC, link, job.num_tokens[0])
                    for num_tokens in job.paced_tokens:
                        _tell(reader.copy(Way.GRPC, link, num_tokens, paced=True))


def _tell(copied: Copied) -> None:
    print(msgspec.json.encode({"event": "copied", "copied": copied}).decode(), flush=True)


class _Reader:
    def __init__(self, job: Job, holder: Any) -> None:
        self._job = job
        self._holder = holder
        self._longest = max((*job.num_tokens, *job.paced_tokens))
        self._cache = Cache(job.model, self._longest, READER)
        self._copies = 0

    @contextmanager
    def open(self, way: Way) -> Iterator[Link]:
        link = self._link(way, self._ask(way))
        yield link
        link.close()
        self._ask(None)

    def copy(self, way: Way, link: Link, num_tokens: int, *, paced: bool = False) -> Copied:
        """Raises WayError unless the right blocks came."""
        prompt = self._prompt(num_tokens, paced=paced)
        self._cache.mark(prompt.ours)
        self._ask(prompt)
        pids = (self._job.holder_pid, os.getpid())
        before = [process_cpu_s([pid]) for pid in pids]
        begin = time.monotonic()
        link.copy(prompt)
        end = time.monotonic()
        holder_s, reader_s = (
            process_cpu_s([pid]) - cpu_s for pid, cpu_s in zip(pids, before, strict=True)
        )
        if way in _MARKED and not self._cache.holds(prompt.ours, HOLDER, prompt.theirs):
            raise WayError(f"{way}: {num_tokens} tokens came wrong")
        if paced:
            begin = self._ask("last chunk")
        return Copied(way, num_tokens, end - begin, holder_s, reader_s, paced)

    def _prompt(self, num_tokens: int, *, paced: bool) -> Prompt:
        self._copies += 1
        count = num_blocks(num_tokens)
        theirs, ours = (
            used_blocks(self._cache.num_blocks, count, seed=2 * self._copies + side)
            for side in range(2)
        )
        model = self._job.model
        chunk_s = model.chunk_s if paced else 0.0
        return Prompt(self._copies, num_tokens, model.num_bytes(num_tokens), theirs, ours, chunk_s)

    def _link(self, way: Way, hello: Any) -> Link:
        match way:
            case Way.MEMCPY:
                return MemcpyLink(self._cache, self._job.model.num_bytes(self._longest))
            case Way.SOCKET:
                return SocketLink(self._cache, hello)
            case Way.GRPC:
                return GrpcLink(self._cache, hello)
            case Way.NIXL_SHM | Way.NIXL_TCP:
                return NixlLink(way, self._cache, hello)

    def _ask(self, message: Any) -> Any:
        self._holder.send(message)
        return self._holder.recv()


if __name__ == "__main__":
    main(*sys.argv[1:])
