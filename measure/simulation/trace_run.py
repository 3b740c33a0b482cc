"""Traffic through a simulated fleet: what its users would see, and what it would cost."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt

from measure.simulation import virtual_time
from measure.simulation.cluster import Cluster, error_logs, record_of
from measure.simulation.network import Network
from measure.simulation.roofline import Architecture, Gpu, Precision, Roofline
from measure.simulation.traces import Arrival, token_ids
from measure.simulation.worker import MODEL, WorkerSpec
from measure.stats import Percentiles, percentiles
from pdserve.config import GatewayConfig, ModelConfig, SimConfig
from pdserve.errors import PdserveError
from pdserve.types import GenerateSpec, Mode, Role, SamplingParams, TokenPrompt

_LONGEST_S = 24 * 3600.0
_NONE = Percentiles(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds: to the first token, and a token after it on average; and so much more of each for
    each prompt token."""

    ttft_s: float
    tpot_s: float
    ttft_token_s: float = 0.0
    tpot_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet and how it is used.

    `prefill` of the `workers` read prompts for others and do nothing else, and the others write;
    in colocated mode all write, and so they do in auto mode where `prefill` is 0, but read for
    each other, too. A worker that writes takes `decode_chunk` prompt tokens a step,
    one that only reads `prefill_chunk`.
    `balance` and `decider` are those of pdserve's configuration, which `targets` go into, too.
    """

    mode: Mode
    workers: int
    prefill: int
    model: Architecture
    gpu: Gpu
    precision: Precision = Precision.BF16
    tensor_parallel: int = 1
    prefill_chunk: int = 8192
    decode_chunk: int = 256
    balance: str = "prefix-aware"
    decider: Literal["threshold", "estimate"] = "estimate"
    targets: Targets = Targets(1.0, 0.02)


@dataclass(slots=True)
class Seen:
    """What was measured; a failed or refused request has no times. Seconds. `prompt_tokens`,
    `answer_tokens`, `ttft_s` and `tpot_s` are of the same requests, in the order in which they
    ended.

    Of tokens that an engine made together, `gaps_s` has the mean, and `gaps` how many they are.
    """

    asked: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: array[int] = field(default_factory=lambda: array("l"))
    answer_tokens: array[int] = field(default_factory=lambda: array("l"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[int] = field(default_factory=lambda: array("l"))
    hit_rate: float = 0.0
    duration_s: float = 0.0
    gpu_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """`good` is the part of all requests that met both targets, `goodput` how many a second."""

    requests: int
    failed: int
    failures: dict[str, int]
    modes: dict[str, int]
    ttft_ms: Percentiles
    itl_ms: Percentiles
    good: float
    goodput: float
    hit_rate: float
    duration_s: float
    gpu_hours: float


def simulate(arrivals: list[Arrival], setup: Setup, washout_s: float = 0.0) -> Seen:
    """Serves all arrivals to their end; what comes in the first `washout_s` is not in what was
    seen. Raises ValueError where the model does not fit."""
    with error_logs():
        # A simulation makes much garbage and few cycles of it.
        thresholds = gc.get_threshold()
        gc.set_threshold(100_000, 50, 100)
        try:
            return virtual_time.run(_run(arrivals, setup, washout_s), _LONGEST_S)
        finally:
            gc.set_threshold(*thresholds)


async def _run(arrivals: list[Arrival], setup: Setup, washout_s: float) -> Seen:
    cluster = Cluster(
        _specs(setup),
        # Nobody is refused: what comes too late is served too, and counted.
        ModelConfig(
            name=MODEL,
            mode=setup.mode,
            decider=setup.decider,
            prefill_balance=setup.balance,
            decode_balance=setup.balance,
            ttft_target_s=setup.targets.ttft_s,
            ttft_target_token_s=setup.targets.ttft_token_s,
            itl_target_s=setup.targets.tpot_s,
            max_ttft_s=1e9,
        ),
        Network(Random(0)),
        GatewayConfig(max_queued=1_000_000),
        setup.model.context_length,
    )
    seen, unseen = Seen(), Seen()
    seen.asked = sum(arrival.at_s >= washout_s for arrival in arrivals)
    loop = asyncio.get_running_loop()
    async with cluster.running(prove=False):
        await asyncio.sleep(1.0)  # all are met by then
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number, arrival in enumerate(arrivals):
                if (wait_s := began + arrival.at_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                whose = seen if arrival.at_s >= washout_s else unseen
                tasks.create_task(_ask(cluster, arrival, number, whose))
        seen.duration_s = loop.time() - began
        queries = sum(worker.prefix_queries for worker in cluster.workers.values())
        hits = sum(worker.prefix_hits for worker in cluster.workers.values())
    seen.hit_rate = hits / max(1, queries)
    seen.gpu_hours = setup.workers * setup.tensor_parallel * seen.duration_s / 3600
    return seen


def _specs(setup: Setup) -> dict[str, WorkerSpec]:
    timing = Roofline(setup.model, setup.gpu, setup.precision, setup.tensor_parallel)
    specs = {}
    for number in range(setup.workers):
        reads = number < setup.prefill and setup.mode is not Mode.COLOCATED
        roles = frozenset({Role.PREFILL if reads else Role.DECODE})
        if setup.mode is Mode.AUTO and not setup.prefill:
            roles = frozenset(Role)
        engine = SimConfig(
            weights=setup.precision.value,
            kv_bytes_per_token=setup.model.kv_bytes_per_token,
            kv_capacity_tokens=timing.kv_capacity_tokens,
            context_length=setup.model.context_length,
            chunk_tokens=setup.prefill_chunk if reads else setup.decode_chunk,
            max_num_seqs=1024,
        )
        name = f"{'p' if reads else 'd'}{number}"
        specs[name] = WorkerSpec(roles, engine, timing, filler=True)
    return specs


async def _ask(cluster: Cluster, arrival: Arrival, number: int, seen: Seen) -> None:
    """One request to its end."""
    loop = asyncio.get_running_loop()
    request_id = f"r{number}"
    spec = GenerateSpec(
        request_id,
        MODEL,
        TokenPrompt(token_ids(arrival, number)),
        SamplingParams(max_tokens=arrival.answer_tokens, temperature=0.0, ignore_eos=True),
    )
    record = record_of(request_id)
    try:
        stream = await cluster.open(spec, record)
    except PdserveError as error:
        seen.failures[error.reason.label] += 1
        return
    first = last = loop.time()

    def tokens_came(number: int) -> None:
        nonlocal last
        now = loop.time()
        seen.gaps_s.append((now - last) / number)
        seen.gaps.append(number)
        last = now

    def write(text: str) -> bool:
        tokens_came(len(text))
        return True

    stream.forward(write)
    try:
        started = False
        async for delta in stream:
            # One character is one token, for a Filler; the first is no gap.
            if number_new := len(delta.text) - (not started):
                tokens_came(number_new)
            started = True
    except PdserveError as error:
        seen.failures[error.reason.label] += 1
        return
    finally:
        await stream.aclose()
    seen.modes[stream.route.mode.value] += 1
    seen.prompt_tokens.append(arrival.prompt_tokens)
    seen.answer_tokens.append(arrival.answer_tokens)
    seen.ttft_s.append(first - record.received)
    seen.tpot_s.append((last - first) / max(1, arrival.answer_tokens - 1))


def met(seen: Seen, targets: Targets) -> npt.NDArray[np.bool_]:
    """Whether each request that was answered met both targets."""
    prompts = np.asarray(seen.prompt_tokens)
    in_time = np.asarray(seen.ttft_s) <= targets.ttft_s + targets.ttft_token_s * prompts
    at_pace = np.asarray(seen.tpot_s) <= targets.tpot_s + targets.tpot_token_s * prompts
    good: npt.NDArray[np.bool_] = in_time & at_pace
    return good


def summary(seen: Seen, targets: Targets) -> Summary:
    gaps_s = np.repeat(np.asarray(seen.gaps_s), np.asarray(seen.gaps))
    good = int(met(seen, targets).sum())
    return Summary(
        requests=seen.asked,
        failed=seen.failures.total(),
        failures=dict(seen.failures),
        modes=dict(seen.modes),
        ttft_ms=percentiles(np.asarray(seen.ttft_s) * 1000) or _NONE,
        itl_ms=percentiles(gaps_s * 1000) or _NONE,
        good=good / seen.asked,
        goodput=good / seen.duration_s,
        hit_rate=seen.hit_rate,
        duration_s=seen.duration_s,
        gpu_hours=seen.gpu_hours,
    )
