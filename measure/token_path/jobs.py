"""What the client process is asked to do, and what it answers; both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from measure.stats import Quantiles

STEP_S = 0.02
"""Seconds between two tokens of a paced stream, as of an engine that makes 50 steps a second."""

PACED = "paced"
QUICK = "quick"
"""Names of the models of the two sources; of one length, so that chunks are too."""

FLAT_OUT_TOKENS = 8_000
"""Tokens of an answer in the flat-out runs; with its prompt it fits a context of 8,192."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where tokens come from, to be read without the router; an address is host:port."""

    protocol: Literal["http", "grpc"]
    paced: str
    quick: str


@dataclass(frozen=True, slots=True)
class Target:
    """A running system: its router's address and processes, and its sources."""

    router: str
    router_pids: tuple[int, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: streams start within `ramp_s`; what comes in `warmup_s` is not counted."""

    ramp_s: float
    warmup_s: float
    window_s: float
    probe_s: float


@dataclass(frozen=True, slots=True)
class Cores:
    """The router's core, and the one of all else."""

    router: int
    others: int


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement. `paced` or else flat out."""

    target: Target
    streams: int
    paced: bool
    timing: Timing
    cores: Cores


@dataclass(frozen=True, slots=True)
class Rate:
    """What came in the window: tokens per second, CPU microseconds of the router per token,
    the busy part of both cores, and the tokens that came with one read of a socket."""

    tokens_per_s: float
    cpu_us: float
    router_busy: float
    others_busy: float
    tokens_per_read: float

    @property
    def router_share(self) -> float:
        """The part of its core that the router itself used, 0 to 1."""
        return self.cpu_us * self.tokens_per_s / 1e6

    @property
    def foreign_share(self) -> float:
        """The part of the router's core that went to other processes, the kernel's included."""
        return max(0.0, self.router_busy - self.router_share)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds through the router and directly: inter-token latency, how far it is from the
    pace (jitter), and time to first token."""

    itl: Quantiles
    direct_itl: Quantiles
    jitter: Quantiles
    direct_jitter: Quantiles
    ttft: Quantiles
    direct_ttft: Quantiles


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job brought; `latency` of a paced one alone."""

    rate: Rate
    latency: Latency | None = None
