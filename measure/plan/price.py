"""What GPUs cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

GPU_HOUR = {"a100": 1.8, "h100": 3.0, "h200": 3.8, "l40s": 1.0}
"""Dollars for an hour of one GPU: round figures amid what clouds asked on demand in 2025, from
less than two thirds of them to more than twice as much. Who knows better says so."""


@dataclass(frozen=True, slots=True)
class Cost:
    """In dollars. A million tokens are of prompts and answers alike, None where their number is
    not known; it and a request are at the rate that is planned for, idle headroom included."""

    hour: float
    request: float
    million_tokens: float | None


def cost(gpus: int, gpu_hour: float, rate: float, tokens: float | None) -> Cost:
    """`rate` is in requests a second, of so many `tokens` each."""
    hour = gpus * gpu_hour
    request = hour / 3600 / rate
    return Cost(hour, request, request / tokens * 1e6 if tokens else None)
