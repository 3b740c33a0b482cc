"""The page that a run writes: Markdown, from the outcomes alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from measure.page import Header, Row, Section, cell, table
from measure.stats import Quantiles, repeated
from measure.token_path.jobs import STEP_S, Outcome
from measure.token_path.plan import Measured, Scenario

SECTION = Section("token path", "make bench")

_QUIET = 0.1
"""What others may use of the router's core before the page says so."""


def render(measured: Sequence[Measured], machine: str, command: str, notes: Sequence[str]) -> str:
    """The generated part of the page, with its markers."""
    systems = list(dict.fromkeys(m.system for m in measured))
    scenarios = list(dict.fromkeys(m.scenario for m in measured))
    paced = [scenario for scenario in scenarios if scenario.paced]
    flat_out = [scenario for scenario in scenarios if not scenario.paced]
    runs = len([m for m in measured if m.system == systems[0] and m.scenario == scenarios[0]])
    pace = round(1 / STEP_S)

    def by_system(header: Header, scenarios: Sequence[Scenario], cells: Callable[..., Row]) -> str:
        rows = [
            (str(scenario.streams), system, *cells(_outcomes(measured, system, scenario)))
            for scenario in scenarios
            for system in systems
        ]
        return table(("streams", "system", *header), rows)

    parts = [
        f"Made by `{command}`: {machine}. Median of {runs} runs in turn (lowest to highest).",
        *notes,
        *_noise(measured),
        f"### CPU of the router, {pace} tokens per second and stream",
        by_system(("µs per token", "tokens/s", "part of its core"), paced, _cpu_cells),
        "### Latency, in milliseconds",
        by_system(
            (
                *("first token added, p50", "p99", "first token direct, p50"),
                *("inter-token added, p50", "p99"),
                *("jitter, p50", "p99", "jitter direct, p50", "p99"),
            ),
            paced,
            _latency_cells,
        ),
        "### Flat out",
        by_system(
            (
                "tokens/s",
                "µs per token",
                "tokens per read",
                "part of its core",
                "other core busy",
            ),
            flat_out,
            _flat_out_cells,
        ),
    ]
    return SECTION.render(parts)


def _noise(measured: Sequence[Measured]) -> list[str]:
    foreign = repeated([m.outcome.rate.foreign_share for m in measured])
    if foreign.median <= _QUIET:
        return []
    return [
        f"**Noisy:** other processes used {foreign.median:.0%} of the router's core (median of all "
        f"measurements; at most {foreign.highest:.0%}). Repeat the run on a quiet machine before "
        "anything is concluded from it."
    ]


def _outcomes(measured: Sequence[Measured], system: str, scenario: Scenario) -> list[Outcome]:
    return [m.outcome for m in measured if (m.system, m.scenario) == (system, scenario)]


def _cpu_cells(outcomes: Sequence[Outcome]) -> Row:
    rates = [outcome.rate for outcome in outcomes]
    return (
        cell([rate.cpu_us for rate in rates], 1),
        cell([rate.tokens_per_s for rate in rates], 0),
        cell([rate.router_share * 100 for rate in rates], 0, " %"),
    )


def _flat_out_cells(outcomes: Sequence[Outcome]) -> Row:
    rates = [outcome.rate for outcome in outcomes]
    return (
        cell([rate.tokens_per_s for rate in rates], 0),
        cell([rate.cpu_us for rate in rates], 1),
        cell([rate.tokens_per_read for rate in rates], 1),
        cell([rate.router_share * 100 for rate in rates], 0, " %"),
        cell([rate.others_busy * 100 for rate in rates], 0, " %"),
    )


def _latency_cells(outcomes: Sequence[Outcome]) -> Row:
    latencies = [outcome.latency for outcome in outcomes if outcome.latency is not None]
    ttft = [latency.ttft - latency.direct_ttft for latency in latencies]
    return (
        *_quantile_cells(ttft),
        cell([latency.direct_ttft.p50 for latency in latencies], 2),
        *_quantile_cells([latency.itl - latency.direct_itl for latency in latencies]),
        *_quantile_cells([latency.jitter for latency in latencies]),
        *_quantile_cells([latency.direct_jitter for latency in latencies]),
    )


def _quantile_cells(values: Sequence[Quantiles]) -> Row:
    return cell([value.p50 for value in values], 2), cell([value.p99 for value in values], 2)
