"""The load client, a process of its own: `python -m measure.token_path.client JOB`.

Carries out one job, given as JSON, and prints its outcome as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import uvloop

from measure.cpu import BusyMeter, process_cpu_s
from measure.stats import deviations, quantiles
from measure.token_path.answers import GrpcReader, HttpReader, Reader, Tally, Window
from measure.token_path.jobs import (
    FLAT_OUT_TOKENS,
    PACED,
    QUICK,
    STEP_S,
    Job,
    Latency,
    Outcome,
    Rate,
    Source,
)
from measure.token_path.sse import AnswerError

_SPARE_S = 1.0
"""Paced streams last longer than what is measured on them, by so much."""


async def carry_out(job: Job) -> Outcome:
    return await (_paced(job) if job.paced else _flat_out(job))


async def _paced(job: Job) -> Outcome:
    timing = job.timing
    lasting = timing.ramp_s + timing.warmup_s + timing.window_s + timing.probe_s + _SPARE_S
    max_tokens = round(lasting / STEP_S)
    window, direct_window = Window(), Window()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        direct = await stack.enter_async_context(_direct(job.target.source, PACED))
        tasks.create_task(direct.answer(PACED, max_tokens, Tally(direct_window)))
        tallies = [Tally(window) for _ in range(job.streams)]
        running = []
        for tally in tallies:
            reader = await stack.enter_async_context(_through_router(job))
            running.append(tasks.create_task(reader.answer(PACED, max_tokens, tally)))
            await asyncio.sleep(timing.ramp_s / job.streams)
        await _warm_up(tallies, timing.warmup_s)
        rate = await _measure(job, (window, direct_window))
        ttft, direct_ttft = await _probe(job)
        if any(task.done() for task in running):
            raise AnswerError("streams ended too soon: is the machine busy otherwise?")
    gaps = [gap * 1000 for gap in window.gaps]
    direct_gaps = [gap * 1000 for gap in direct_window.gaps]
    latency = Latency(
        itl=quantiles(gaps),
        direct_itl=quantiles(direct_gaps),
        jitter=deviations(gaps, STEP_S * 1000),
        direct_jitter=deviations(direct_gaps, STEP_S * 1000),
        ttft=quantiles(ttft),
        direct_ttft=quantiles(direct_ttft),
    )
    return Outcome(rate, latency)


async def _flat_out(job: Job) -> Outcome:
    window = Window()

    async def again_and_again(reader: Reader, tally: Tally) -> None:
        while True:
            await reader.answer(QUICK, FLAT_OUT_TOKENS, tally)
            tally = Tally(window)

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        tallies = [Tally(window) for _ in range(job.streams)]
        running = []
        for tally in tallies:
            reader = await stack.enter_async_context(_through_router(job))
            running.append(tasks.create_task(again_and_again(reader, tally)))
        await _warm_up(tallies, job.timing.warmup_s)
        rate = await _measure(job, (window,))
        for task in running:
            task.cancel()
    return Outcome(rate)


async def _warm_up(tallies: Sequence[Tally], seconds: float) -> None:
    """From when every stream has begun."""
    # Polled, so that no token has to pay for an event.
    while not all(tally.tokens for tally in tallies):  # noqa: ASYNC110
        await asyncio.sleep(STEP_S)
    await asyncio.sleep(seconds)


async def _measure(job: Job, windows: Sequence[Window]) -> Rate:
    """Opens the windows for their time; the rate is that of the first."""
    pids = job.target.router_pids
    busy_meter = BusyMeter((job.cores.router, job.cores.others))
    began, cpu_before = time.monotonic(), process_cpu_s(pids)
    for window in windows:
        window.is_open = True
    await asyncio.sleep(job.timing.window_s)
    for window in windows:
        window.is_open = False
    ended, cpu_after = time.monotonic(), process_cpu_s(pids)
    router_busy, others_busy = busy_meter.busy()
    counted = windows[0]
    if not all(window.tokens for window in windows):
        raise AnswerError("no token came in the whole window: is the machine busy otherwise?")
    return Rate(
        tokens_per_s=counted.tokens / (ended - began),
        cpu_us=(cpu_after - cpu_before) * 1e6 / counted.tokens,
        router_busy=router_busy,
        others_busy=others_busy,
        tokens_per_read=counted.tokens / counted.reads,
    )


async def _probe(job: Job) -> tuple[list[float], list[float]]:
    """Times to first token in milliseconds, in turn through the router and directly."""
    async with _through_router(job) as router, _direct(job.target.source, QUICK) as direct:
        await _first_token_ms(router)  # opens the router's own connection to the source
        await _first_token_ms(direct)
        through_router: list[float] = []
        directly: list[float] = []
        until = time.monotonic() + job.timing.probe_s
        while time.monotonic() < until:
            for reader, times in ((router, through_router), (direct, directly)):
                # At any point of the step that the streams share.
                await asyncio.sleep(random.uniform(0, STEP_S))
                times.append(await _first_token_ms(reader))
        return through_router, directly


async def _first_token_ms(reader: Reader) -> float:
    tally = Tally()
    asked = time.monotonic()
    await reader.answer(QUICK, 1, tally)
    return (tally.first - asked) * 1000


@asynccontextmanager
async def _through_router(job: Job) -> AsyncIterator[Reader]:
    reader = await HttpReader.connect(job.target.router)
    try:
        yield reader
    finally:
        await reader.close()


@asynccontextmanager
async def _direct(source: Source, model: str) -> AsyncIterator[Reader]:
    address = source.paced if model == PACED else source.quick
    is_http = source.protocol == "http"
    reader: Reader = await HttpReader.connect(address) if is_http else GrpcReader(address)
    try:
        yield reader
    finally:
        await reader.close()


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    gc.disable()  # its pauses would be counted as jitter of the router; the process lives shortly
    try:
        outcome = uvloop.run(carry_out(job))
    except* AnswerError as errors:
        sys.exit(str(errors.exceptions[0]))
    print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
