"""Sends requests when they are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import httpx

from measure.bench.answer import Answer, ask
from measure.simulation.traces import Arrival

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "with",
    "as",
    "by",
    "from",
)
_TIMEOUT = httpx.Timeout(10.0, read=120.0, pool=None)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load: what it is called in the report, its base URL, the model to ask for,
    headers of every request."""

    name: str
    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.url,
        headers={"content-type": "application/json", **target.headers},
        timeout=_TIMEOUT,
        limits=limits,
        trust_env=False,
    ) as client:
        yield client


def _unwatched() -> None:
    pass


async def drive(
    target: Target,
    arrivals: Sequence[Arrival],
    seed: int,
    answered: Callable[[], None] = _unwatched,
) -> list[Answer]:
    """All answers, once the last one has ended, in order of arrival. Prompts are made of `seed`
    and like no other's; `answered` is called at the end of each."""
    async with connected(target) as client, asyncio.TaskGroup() as asking:
        began = time.monotonic()
        answers = []
        for number, arrival in enumerate(arrivals):
            due = began + arrival.at_s
            body = _body(target.model, arrival, Random(f"{seed} {number}"))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            call = ask(client, "/v1/chat/completions", body, arrival.prompt_tokens, due)
            answers.append(asking.create_task(call))
            answers[-1].add_done_callback(lambda _: answered())
    return [answer.result() for answer in answers]


def _body(model: str, arrival: Arrival, random: Random) -> dict[str, object]:
    # Common words are one token each for every tokenizer in use.
    text = " ".join(random.choices(_WORDS, k=arrival.prompt_tokens))
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": arrival.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
