"""The tables of load generators side by side: Markdown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from measure.page import Section, cell, table
from measure.peers.figures import Figures
from measure.peers.generators import Load

SECTION = Section("beside other load generators", "make bench-peers")

_ROWS: dict[str, tuple[Callable[[Figures], float], int]] = {
    "prompt tokens, mean": (lambda it: it.prompt_tokens, 0),
    "TTFT p50, ms": (lambda it: it.ttft_p50, 1),
    "TTFT p99, ms": (lambda it: it.ttft_p99, 1),
    "TPOT p50, ms": (lambda it: it.tpot_p50, 2),
    "TPOT p99, ms": (lambda it: it.tpot_p99, 2),
    "answer tokens a second": (lambda it: it.tokens_per_s, 0),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load generator said of one run."""

    generator: str
    load: Load
    figures: Figures


def render(measured: Sequence[Measured], machine: str, command: str, notes: Sequence[str]) -> str:
    load = measured[0].load
    by_name = {
        name: [it.figures for it in measured if it.generator == name]
        for name in dict.fromkeys(it.generator for it in measured)
    }
    runs = len(next(iter(by_name.values())))
    failed = sum(it.figures.failed for it in measured)
    told = (
        f"Made by `{command}`: {machine}. `pdserve up --engine sim`, {load.rate:g} requests a "
        f"second for {load.seconds:g} s (Poisson), {load.prompt_tokens} tokens in, "
        f"{load.answer_tokens} out; median of {runs} runs each, in alternation (lowest to "
        f"highest). {failed} requests failed."
    )
    rows = [_row(name, by_name, of, digits) for name, (of, digits) in _ROWS.items()]
    return SECTION.render([told, table(("", *by_name, "medians apart"), rows), *notes])


def _row(
    name: str,
    by_name: dict[str, list[Figures]],
    of: Callable[[Figures], float],
    digits: int,
) -> tuple[str, ...]:
    values = [[of(it) for it in figures] for figures in by_name.values()]
    medians = [median(it) for it in values]
    apart = (max(medians) - min(medians)) / median(medians)
    return (name, *(cell(it, digits) for it in values), f"{apart:.1%}")
