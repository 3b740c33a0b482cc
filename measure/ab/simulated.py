"""The same traffic on simulated fleets, in virtual time, as an experiment of paired slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from measure.simulation.trace_run import Seen, Setup, Targets, met, simulate
from measure.simulation.traces import Arrival
from pdserve.ab.slots import Arm, Experiment, Slot, quantiles


def play(
    traffic: str,
    arrivals: Sequence[Arrival],
    arms: Mapping[str, Setup],
    slot_s: float,
    washout_s: float,
    told: Callable[[str], None],
) -> Experiment:
    """Each whole slot of the traffic is served by each arm's fleet, from idle; requests of its
    first `washout_s` seconds fill the fleet and do not count. `told` hears of each slot.

    Raises ValueError where the model does not fit.
    """
    slots = []
    for block, coming in enumerate(_cut(arrivals, slot_s)):
        if not any(arrival.at_s >= washout_s for arrival in coming):
            continue
        for name, setup in arms.items():
            told(f"slot {block}, {name}: {len(coming)} requests")
            seen = simulate(coming, setup, washout_s)
            slots.append(_slot(block, name, seen, setup.targets, slot_s - washout_s))
    return Experiment(
        name=traffic,
        model="",
        assignment="paired",
        arms=[
            Arm(name, setup.mode, setup.workers * setup.tensor_parallel)
            for name, setup in arms.items()
        ],
        slots=slots,
    )


def _cut(arrivals: Sequence[Arrival], slot_s: float) -> list[list[Arrival]]:
    """By whole slots, each from its own beginning on."""
    slots: list[list[Arrival]] = [[] for _ in range(int(arrivals[-1].at_s // slot_s))]
    for arrival in arrivals:
        number, at_s = divmod(arrival.at_s, slot_s)
        if number < len(slots):
            slots[int(number)].append(replace(arrival, at_s=at_s))
    return slots


def _slot(block: int, arm: str, seen: Seen, targets: Targets, seconds: float) -> Slot:
    good = met(seen, targets)
    tokens = np.asarray(seen.prompt_tokens) + np.asarray(seen.answer_tokens)
    return Slot(
        block=block,
        arm=arm,
        asked=seen.asked,
        good=int(good.sum()),
        good_tokens=int(tokens[good].sum()),
        seconds=seconds,
        ttft_s=quantiles(np.asarray(seen.ttft_s)),
        itl_s=quantiles(np.repeat(np.asarray(seen.gaps_s), np.asarray(seen.gaps))),
    )
