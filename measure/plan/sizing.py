"""How many GPUs a rate takes, served one way or another, and which is the cheapest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from measure.highest import PRECISION
from measure.plan.fleet import (
    Saturation,
    Traffic,
    least_fleet,
    least_work_s,
    meets,
    saturation,
)
from measure.plan.price import Cost, cost
from measure.plan.slo import Constraint, Slo
from measure.simulation.roofline import Architecture, Gpu, Precision, Roofline
from measure.simulation.trace_run import Setup, Targets
from pdserve.types import Mode

HEADROOM = 0.3
TENSOR_PARALLEL = (1, 2, 4, 8)
CELL_RATE = 40.0
"""Requests a second beyond which a fleet is planned as equal cells: what is gained by sharing
more than that is little, and a trace is soon too short for more."""

_EASY = 1 / 8
"""Of what its workers could serve if nothing ever waited: a rate that most fleets can."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """`rate` in requests a second, `headroom` so much more of it, `gpu_hour` in dollars. Of
    `precisions` the cheapest is taken."""

    model: Architecture
    gpu: Gpu
    rate: float
    slo: Slo
    gpu_hour: float
    precisions: Sequence[Precision] = tuple(Precision)
    headroom: float = HEADROOM

    @property
    def with_headroom(self) -> float:
        return self.rate * (1 + self.headroom)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that only read for others and those that write, all of one kind; `saturation` is
    the rate, in requests a second, that all of it serves at the most, and `constraint` what is
    broken beyond. What was measured has no precision, where nobody said."""

    prefill: int
    decode: int
    tensor_parallel: int
    precision: Precision | None
    saturation: float
    constraint: Constraint | None
    cost: Cost

    @property
    def gpus(self) -> int:
        return (self.prefill + self.decode) * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Sizing:
    """By way of serving; None where nothing that was tried serves the rate within the SLO."""

    fleets: Mapping[str, Fleet | None]

    @property
    def cheapest(self) -> str | None:
        """The first one where several cost the same."""
        found = {name: fleet.cost.hour for name, fleet in self.fleets.items() if fleet is not None}
        return min(found, key=found.__getitem__, default=None)

    @property
    def margin(self) -> float | None:
        """What the cheapest saves, as a part of what the next one costs."""
        costs = sorted(fleet.cost.hour for fleet in self.fleets.values() if fleet is not None)
        return None if len(costs) < 2 else 1 - costs[0] / costs[1]


def replicas(rate: float, capacity: float, headroom: float) -> int:
    """Equal replicas for a rate, each of which serves `capacity`; both in one unit.

    1,000 a minute, 50 of which one replica serves, take 26 with a headroom of 0.3.
    """
    # Less a rounding error, which must not cost a replica.
    return max(1, ceil(rate * (1 + headroom) / capacity - 1e-9))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one replica served at the most: requests a second, of so many tokens each where that
    is known, on so many GPUs."""

    capacity: float
    gpus: int = 1
    constraint: Constraint | None = None
    tokens: float | None = None


def size_measured(
    measured: Mapping[str, Measured], rate: float, headroom: float, gpu_hour: float
) -> Sizing:
    """Replicas of whatever was measured; `rate` in requests a second."""
    fleets: dict[str, Fleet | None] = {}
    for name, it in measured.items():
        if not it.capacity:
            fleets[name] = None
            continue
        number = replicas(rate, it.capacity, headroom)
        fleets[name] = Fleet(
            0,
            number,
            it.gpus,
            None,
            number * it.capacity,
            it.constraint,
            cost(number * it.gpus, gpu_hour, rate, it.tokens),
        )
    return Sizing(fleets)


def size(traffic: Traffic, asked: Asked, report: Report) -> Sizing:
    """Of both modes; `report` is told what is being tried."""
    modes = Mode.COLOCATED, Mode.DISAGGREGATED
    return Sizing({mode.value: cheapest(traffic, asked, mode, report) for mode in modes})


def cheapest(traffic: Traffic, asked: Asked, mode: Mode, report: Report) -> Fleet | None:
    """The fleet with the fewest GPUs, and how much it serves."""
    cells = ceil(asked.with_headroom / CELL_RATE)
    rate = asked.with_headroom / cells
    setup = _fewest_gpus(traffic, asked, mode, rate, report)
    if setup is None:
        return None
    report(f"{mode}: how much {setup.workers} workers serve")
    reached = _reached(traffic, setup, asked.slo, rate)
    return Fleet(
        cells * setup.prefill,
        cells * (setup.workers - setup.prefill),
        setup.tensor_parallel,
        setup.precision,
        cells * reached.rate,
        reached.constraint,
        cost(
            cells * _gpus(setup),
            asked.gpu_hour,
            asked.rate,
            traffic.prompt_tokens + traffic.answer_tokens,
        ),
    )


def _reached(traffic: Traffic, setup: Setup, slo: Slo, rate: float) -> Saturation:
    """Of a fleet that serves `rate`, which may be a very small part of what it could: looked for
    from nearer to that on."""
    read_s, write_s = least_work_s(traffic, setup)
    most = setup.workers / (read_s + write_s)
    near = saturation(traffic, setup, slo, max(rate, most * _EASY))
    return near if near.rate else saturation(traffic, setup, slo, rate)


def _fewest_gpus(
    traffic: Traffic, asked: Asked, mode: Mode, rate: float, report: Report
) -> Setup | None:
    """By branch and bound over tensor parallelism and precisions: those that need least at the
    very least are tried first, and the rest only while they may need less."""
    bounds = []
    for setup in _setups(asked, mode):
        read_s, write_s = least_work_s(traffic, setup)
        if mode is Mode.COLOCATED:
            workers = ceil(rate * (read_s + write_s))
        else:
            workers = ceil(rate * read_s) + ceil(rate * write_s)
        bounds.append((workers * setup.tensor_parallel, setup))
    best: Setup | None = None
    for bound, setup in sorted(bounds, key=lambda it: it[0]):
        if best is not None and bound >= _gpus(best):
            break
        report(f"{mode}: {setup.tensor_parallel} GPUs a worker, {setup.precision}")
        found = least_fleet(traffic, rate, setup, asked.slo)
        if found is not None and (best is None or _gpus(found) < _gpus(best)):
            best = found
    return best


def _setups(asked: Asked, mode: Mode) -> Iterator[Setup]:
    for precision in asked.precisions:
        for ranks in TENSOR_PARALLEL:
            try:
                Roofline(asked.model, asked.gpu, precision, ranks)
            except ValueError:  # it does not fit, or cannot be divided
                continue
            targets = Targets(asked.slo.ttft_p99_s, asked.slo.itl_p99_s)
            yield Setup(mode, 1, 0, asked.model, asked.gpu, precision, ranks, targets=targets)


def _gpus(setup: Setup) -> int:
    return setup.workers * setup.tensor_parallel


def best_split(traffic: Traffic, setup: Setup, slo: Slo, start: float) -> tuple[Setup, Saturation]:
    """How `setup.workers` are best divided into who reads and who writes: the split that serves
    most within the SLO. The search for its rate begins at `start`. At least two workers.

    A split that is no better than one before is tried but once.
    """
    found: tuple[Setup, Saturation] | None = None
    for prefill in range(1, setup.workers):
        split = replace(setup, mode=Mode.DISAGGREGATED, prefill=prefill)
        if found is None or not found[1].rate:
            found = split, saturation(traffic, split, slo, start)
        elif meets(traffic, better := found[1].rate * PRECISION, split, slo):
            found = split, saturation(traffic, split, slo, better)
    assert found is not None, "two workers can be divided"
    return found
