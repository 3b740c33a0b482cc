"""The file that `pdserve bench` writes, and what a plan reads of it. Pure.

The schema's name has its version: a reader of another one refuses it. Times are in seconds,
rates in requests a second.
"""

from __future__ import annotations

import msgspec

from measure.plan.sizing import Measured
from measure.plan.slo import Constraint, Slo
from measure.stats import Percentiles

SCHEMA = "pdserve-bench/2"


class DocumentError(Exception):
    """A file that is none of ours; the message says why, in one line."""


class Window(msgspec.Struct, frozen=True):
    """The part of a run whose requests were due around `at_s`, from the run's beginning on."""

    at_s: float
    requests: int
    good: int
    ttft_s: Percentiles | None
    itl_s: Percentiles | None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one target: what was due after the warm-up, and what became of it.

    `offered` is the rate at which requests were due, `duration_s` from the first of them to the
    end of the last answer. `ttft_s` and `latency_s` count from when a request was due, `itl_s` are
    all gaps between chunks of answers, `tpot_s` their mean by request. `late_p99_s` is how late the
    client sent requests: `client_limited` says that this was so late that the figures are those of
    the client. Percentiles are of requests that were answered, None where there is none. `modes`
    counts answers by the `x-pdserve-mode` that they came with. `windows` share the run out evenly
    and leave out those in which nothing was due; lists of percentiles are those from 0 to 100.
    """

    offered: float
    duration_s: float
    requests: int
    failures: dict[str, int]
    modes: dict[str, int]
    prompt_tokens: int
    answer_tokens: int
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    tpot_s: Percentiles | None
    latency_s: Percentiles | None
    good: int
    late_p99_s: float
    client_limited: bool
    broken: Constraint | None
    windows: list[Window]
    ttft_percentiles_s: list[float]
    itl_percentiles_s: list[float]

    @property
    def attainment(self) -> float:
        """Part of the requests that were within the SLO, each by itself."""
        return self.good / self.requests

    @property
    def goodput(self) -> float:
        """Requests a second that were within the SLO, each by itself."""
        return self.attainment * self.offered

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


class Saturation(msgspec.Struct, frozen=True):
    """The highest rate within the SLO; `constraint` is what broke beyond it. Where the client was
    the limit, it is a lower bound."""

    rate: float
    constraint: Constraint | None
    client_limited: bool


class Target(msgspec.Struct, frozen=True):
    """A server: `runs` at the asked rate in their order, `search` those that looked for its
    saturation, None where nobody asked for that."""

    name: str
    url: str
    model: str
    runs: list[Run]
    search: list[Run]
    saturation: Saturation | None


class Document(msgspec.Struct, frozen=True):
    """`arrivals` tells in words how requests came."""

    schema: str
    made: str
    machine: str
    command: str
    arrivals: str
    slo: Slo
    warm_up_s: float
    targets: list[Target]


class _Head(msgspec.Struct):
    schema: str


def encode(document: Document) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(data: bytes) -> Document:
    """Raises DocumentError."""
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema != SCHEMA:
            raise DocumentError(f"its schema is {schema!r}, and {SCHEMA!r} is wanted")
        return msgspec.json.decode(data, type=Document)
    except msgspec.MsgspecError as error:
        raise DocumentError(f"no file of pdserve bench: {error}") from None


def capacities(data: bytes, gpus: int) -> dict[str, Measured]:
    """What each target serves, on so many GPUs. Raises DocumentError, also where the saturation
    of one was not looked for, or not found for want of a faster client."""
    found = {}
    for target in decode(data).targets:
        if target.saturation is None:
            raise DocumentError(f"the saturation of {target.name} was not looked for")
        if target.saturation.client_limited:
            raise DocumentError(
                f"{target.name} serves more than {target.saturation.rate:.3g} requests/s, for the "
                "client was the limit there: measure it again from a faster or less busy machine"
            )
        runs = [*target.runs, *target.search]
        requests = sum(run.requests for run in runs)
        tokens = sum(run.prompt_tokens + run.answer_tokens for run in runs)
        found[target.name] = Measured(
            target.saturation.rate,
            gpus,
            target.saturation.constraint,
            tokens / requests if requests else None,
        )
    return found
