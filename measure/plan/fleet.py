"""Fleets of a modelled GPU: what one serves within an SLO, and the least that serves a rate. Pure.

What a worker must do for a request, at the least, bounds the search from below: its prompt in
full steps, and for each token of its answer the KV that it reads (a roofline, as in
`measure.simulation.roofline`). The law of utilisation (rate times work is at most the number of
workers; Lazowska et al., "Quantitative System Performance", 1984) gives the least number. From
there on a replay of the trace says whether the SLO is met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from coordinator.policy.snapshot import ModelPolicy
from measure.highest import highest
from measure.plan.replay import replay
from measure.plan.server import Pool
from measure.plan.slo import Constraint, Latencies, Slo
from measure.simulation.roofline import Roofline
from measure.simulation.trace_run import Setup
from measure.simulation.traces import Arrival, faster
from pdserve.engine.sim_timing import StepWork
from pdserve.types import Mode

_MOST = 4
"""Times the least number of workers: what they cannot serve, more hardly can."""


class Traffic:
    """The same requests at any rate, in requests a second. `cached` is the part of each prompt
    that is cached whatever the trace tells."""

    def __init__(self, arrivals: Sequence[Arrival], cached: float = 0.0) -> None:
        """At least two arrivals, in order, that do not all come at once. Raises ValueError."""
        if len(arrivals) < 2 or not arrivals[-1].at_s:
            raise ValueError("the traffic is too short to plan by")
        self.arrivals = list(arrivals)
        self.cached = cached
        self.own_rate = len(arrivals) / arrivals[-1].at_s
        self.prompt_tokens = sum(it.prompt_tokens for it in arrivals) / len(arrivals)
        self.answer_tokens = sum(it.answer_tokens for it in arrivals) / len(arrivals)

    def at(self, rate: float) -> list[Arrival]:
        return faster(self.arrivals, rate / self.own_rate)

    def lasts(self, rate: float, slo: Slo) -> bool:
        """Whether a queue that only grows would be seen in it."""
        return len(self.arrivals) / rate >= 2 * slo.ttft_p99_s


def serve(traffic: Traffic, rate: float, setup: Setup) -> Latencies:
    """Raises ValueError where the model does not fit."""
    timing = Roofline(setup.model, setup.gpu, setup.precision, setup.tensor_parallel)

    def pool(workers: int, chunk_tokens: int) -> Pool:
        return Pool(workers, timing, chunk_tokens, timing.kv_capacity_tokens, traffic.cached)

    prefill = None
    if setup.mode is Mode.DISAGGREGATED:
        prefill = pool(setup.prefill, setup.prefill_chunk)
    decode = pool(setup.workers - (prefill.workers if prefill else 0), setup.decode_chunk)
    policy = ModelPolicy(
        setup.mode,
        prefill_balance=setup.balance,
        decode_balance=setup.balance,
        decider=setup.decider,
        ttft_target_s=setup.targets.ttft_s,
        ttft_target_token_s=setup.targets.ttft_token_s,
        itl_target_s=setup.targets.tpot_s,
    )
    return replay(traffic.at(rate), policy, prefill, decode)


@dataclass(frozen=True, slots=True)
class Saturation:
    """The highest rate within the SLO, in requests a second, and what is broken beyond it."""

    rate: float
    constraint: Constraint | None


def saturation(traffic: Traffic, setup: Setup, slo: Slo, start: float) -> Saturation:
    """Looked for from `start` on. No constraint where the trace is too short to tell."""
    broken: dict[float, Constraint | None] = {}

    def attains(rate: float) -> bool:
        if not traffic.lasts(rate, slo):
            broken[rate] = None
            return False
        broken[rate] = serve(traffic, rate, setup).broken(slo)
        return broken[rate] is None

    rate = highest(attains, start)
    beyond = min((it for it in broken if it > rate), default=rate)
    return Saturation(rate, broken[beyond])


def least_work_s(traffic: Traffic, setup: Setup) -> tuple[float, float]:
    """Seconds of a worker that a mean request takes at the least: to read it, to write it."""
    timing = Roofline(setup.model, setup.gpu, setup.precision, setup.tensor_parallel)
    chunk = setup.decode_chunk if setup.mode is Mode.COLOCATED else setup.prefill_chunk
    new = pairs = context = 0.0
    for it in traffic.arrivals:
        cached = traffic.cached * it.prompt_tokens
        new += it.prompt_tokens - cached
        pairs += (it.prompt_tokens**2 - cached**2) / 2
        context += it.answer_tokens * (it.prompt_tokens + it.answer_tokens / 2)
    number = len(traffic.arrivals)
    steps = new / number / chunk
    full = StepWork(chunk, round(pairs * chunk / new))
    # The KV of one token, beside whatever else a step does.
    token_s = (
        timing.step_s(replace(full, write_context=1_000_000)) - timing.step_s(full)
    ) / 1_000_000
    return steps * timing.step_s(full), context / number * token_s


def meets(traffic: Traffic, rate: float, setup: Setup, slo: Slo) -> bool:
    return serve(traffic, rate, setup).broken(slo) is None


def least_fleet(traffic: Traffic, rate: float, setup: Setup, slo: Slo) -> Setup | None:
    """With the fewest workers that serve the rate within the SLO; `setup` says all but how many.
    None where some four times as many as must be would not do.

    The pools of a split are looked for one after the other, the second at its ease meanwhile:
    the first token depends on who reads, and those after it on who writes.
    """

    def enough(readers: int, others: int) -> bool:
        fleet = replace(setup, workers=readers + others, prefill=readers)
        return meets(traffic, rate, fleet, slo)

    read_s, write_s = least_work_s(traffic, setup)
    readers = 0
    writers = max(1, ceil(rate * write_s))
    if setup.mode is Mode.COLOCATED:
        writers = max(1, ceil(rate * (read_s + write_s)))
    else:
        at_ease = _MOST * writers
        found = _fewest(lambda number: enough(number, at_ease), max(1, ceil(rate * read_s)))
        if found is None:
            return None
        readers = found
    # One reader more may have to make up for writers that are no more at their ease.
    for number in (readers, readers + 1) if readers else (0,):
        others = _fewest(partial(enough, number), writers)
        if others is not None:
            return replace(setup, workers=number + others, prefill=number)
    return None


def _fewest(does: Callable[[int], bool], least: int) -> int | None:
    """The smallest number that does, and so do all above it; None where none is found."""
    low, number = least - 1, least
    while not does(number):
        if number >= _MOST * least:
            return None
        low, number = number, number + max(1, number // 4)
    while number > low + 1:
        middle = (low + number) // 2
        if does(middle):
            number = middle
        else:
            low = middle
    return number
