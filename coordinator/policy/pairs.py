"""Which pairs of workers may hand KV over, and by which transport. Pure: time is passed in.

A pair is *untried* until it was probed, *proven* by a probe that went through, *refused* for
good where the two processes differ, and *quarantined* after failures: no traffic then, but
probes, ever more rarely, until one goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.types import Fingerprint, WorkerInfo

RETRY_S = 2.0
"""From a failure to the next probe; doubled by each setback that follows."""
MAX_RETRY_S = 60.0

Process = tuple[str, str]
"""(worker id, epoch): a restart makes another process."""


class PairState(StrEnum):
    UNTRIED = "untried"
    PROVEN = "proven"
    REFUSED = "refused"
    QUARANTINED = "quarantined"


PROBED = frozenset({PairState.UNTRIED, PairState.QUARANTINED})


@dataclass(frozen=True, slots=True)
class Pair:
    """Two worker processes and a KV transport between them; empty where none can be."""

    prefill: Process
    decode: Process
    transport: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a pair stands, or a single worker, and why in words.

    `failures` counts its requests that failed since one went through, `setbacks` the failed
    probes and quarantines since then. `probe_at`, on the caller's clock, is when an untried or
    quarantined one is probed next.
    """

    state: PairState = PairState.UNTRIED
    detail: str = ""
    failures: int = 0
    setbacks: int = 0
    probe_at: float = float("-inf")

    def probe_passed(self, note: str) -> Standing:
        """Setbacks stay: a pair whose probes pass and whose requests fail must not flap."""
        return Standing(PairState.PROVEN, note, setbacks=self.setbacks)

    def probe_failed(self, cause: str, now: float) -> Standing:
        wait = min(RETRY_S * 2**self.setbacks, MAX_RETRY_S)
        return Standing(PairState.QUARANTINED, cause, self.failures, self.setbacks + 1, now + wait)

    def probe_put_off(self, cause: str, now: float) -> Standing:
        """A worker was too busy for the probe, which so tells nothing of the pair."""
        return replace(self, detail=cause, probe_at=now + RETRY_S)

    def request_passed(self) -> Standing:
        return replace(self, failures=0, setbacks=0)

    def request_failed(self, cause: str, now: float, quarantine_after: int) -> Standing:
        """Quarantined by the `quarantine_after`th failure in a row; only what is proven can be,
        for any other has no traffic left but what began before."""
        if self.state is not PairState.PROVEN:
            return self
        failed = replace(self, failures=self.failures + 1)
        if failed.failures < quarantine_after:
            return failed
        words = f"{failed.failures} requests failed in a row, the last one: {cause}"
        return failed.probe_failed(words, now)


class PairTable:
    """The standing of every pair of connected processes that have met, best transports first.

    Verdicts on pairs that are not in the table are too late, and are dropped.
    """

    def __init__(self, quarantine_after: int) -> None:
        self._quarantine_after = quarantine_after
        self._standings: dict[Pair, Standing] = {}
        self._met: set[tuple[Process, Process]] = set()
        self._proven: Mapping[tuple[str, str], tuple[str, ...]] | None = None

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._standings)

    def __getitem__(self, pair: Pair) -> Standing:
        return self._standings[pair]

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._standings

    @property
    def proven(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The transports that may be used, best first, by (prefill id, decode id)."""
        if self._proven is None:
            proven: dict[tuple[str, str], tuple[str, ...]] = {}
            for pair, standing in self._standings.items():
                if standing.state is PairState.PROVEN:
                    ids = pair.prefill[0], pair.decode[0]
                    proven[ids] = (*proven.get(ids, ()), pair.transport)
            self._proven = proven
        return self._proven

    def have_met(self, prefill: Process, decode: Process) -> bool:
        return (prefill, decode) in self._met

    def meet(self, pair: Pair, refusal: str = "") -> None:
        """Enters a pair: untried, or refused for good."""
        self._met.add((pair.prefill, pair.decode))
        state = PairState.REFUSED if refusal else PairState.UNTRIED
        self._standings[pair] = Standing(state, refusal)

    def forget(self, process: Process) -> None:
        """Drops the pairs of a process that was lost."""
        for pair in [pair for pair in self if process in (pair.prefill, pair.decode)]:
            del self._standings[pair]
            self._met.discard((pair.prefill, pair.decode))
        self._proven = None

    def quarantine(self, prefill: Process, cause: str, now: float) -> None:
        """Takes out of traffic whatever a prefill process would hand over."""
        for pair in self:
            if pair.prefill == prefill and self[pair].state is PairState.PROVEN:
                self._standings[pair] = self[pair].probe_failed(cause, now)
        self._proven = None

    def probe_passed(self, pair: Pair, note: str) -> None:
        """`note` is what its operator should know of it, in words."""
        if pair in self:
            self._set(pair, self[pair].probe_passed(note))

    def probe_failed(self, pair: Pair, cause: str, now: float) -> None:
        if pair in self:
            self._set(pair, self[pair].probe_failed(cause, now))

    def probe_put_off(self, pair: Pair, cause: str, now: float) -> None:
        if pair in self:
            self._set(pair, self[pair].probe_put_off(cause, now))

    def request_passed(self, pair: Pair) -> None:
        if pair in self:
            self._standings[pair] = self[pair].request_passed()

    def request_failed(self, pair: Pair, cause: str, now: float) -> bool:
        """Whether the pair is quarantined by this failure."""
        if pair not in self or self[pair].state is not PairState.PROVEN:
            return False
        self._set(pair, self[pair].request_failed(cause, now, self._quarantine_after))
        return self[pair].state is PairState.QUARANTINED

    def due(self, now: float) -> list[Pair]:
        """The pairs that are to be probed now."""
        return [pair for pair, at in self._probes() if at <= now]

    def next_probe(self, now: float) -> float | None:
        """When a pair is to be probed that is not due yet; None for never."""
        return min((at for _, at in self._probes() if at > now), default=None)

    def _probes(self) -> Iterator[tuple[Pair, float]]:
        for pair, standing in self._standings.items():
            if standing.state in PROBED:
                yield pair, standing.probe_at

    def _set(self, pair: Pair, standing: Standing) -> None:
        self._standings[pair] = standing
        self._proven = None


def pairs_of(
    prefill: WorkerInfo, decode: WorkerInfo, wanted: str | None, *, mixed_precision: bool
) -> dict[Pair, str]:
    """The pairs of two workers of one model, best transport first, with a refusal each: in
    words that name every difference, empty for one that may be probed.

    `wanted` is the one transport that the configuration allows; None allows all.
    `mixed_precision` allows their weights to differ.
    """
    processes = (prefill.worker_id, prefill.epoch), (decode.worker_id, decode.epoch)
    refusals = [differences(prefill.fingerprint, decode.fingerprint)]
    if not mixed_precision and (words := mixture(prefill, decode)):
        refusals.append(f"{words}, and mixed_precision is off")
    refusal = "; ".join(filter(None, refusals))
    common = [name for name in decode.transports if name in prefill.transports]
    if wanted is not None:
        common = [name for name in common if name == wanted]
    if refusal or not common:
        return {Pair(*processes, ""): refusal or _apart(prefill, decode, wanted)}
    return {Pair(*processes, name): "" for name in common}


def differences(prefill: Fingerprint, decode: Fingerprint) -> str:
    """In words, each field in which two fingerprints differ; empty when none does."""
    return "; ".join(
        f"{name} is {ours!r} on the prefill side and {theirs!r} on the decode side"
        for name in Fingerprint.__slots__
        if (ours := getattr(prefill, name)) != (theirs := getattr(decode, name))
    )


def mixture(prefill: WorkerInfo, decode: WorkerInfo) -> str:
    """In words, how the precisions of two workers' weights differ; empty when they do not."""
    ours, theirs = prefill.weights, decode.weights
    if ours == theirs:
        return ""
    return f"weights are {ours} on the prefill side and {theirs} on the decode side"


def _apart(prefill: WorkerInfo, decode: WorkerInfo, wanted: str | None) -> str:
    what = "no KV transport in common" if wanted is None else f"the KV transport is to be {wanted}"
    ours, theirs = (", ".join(info.transports) or "none" for info in (prefill, decode))
    return f"{what}: the prefill side has {ours}, the decode side {theirs}"
