"""What came of a suite, and how two results compare. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import msgspec

from measure.eval.parting import Parting
from pdserve.errors import ConfigError

ALPHA = 0.05
"""A difference is one where chance alone would make as large a one more rarely than that."""


class Graded(msgspec.Struct, frozen=True):
    """One answer. `mode` and `arm` are those that the server named, empty where it did not;
    `failure` says why there is no answer. `cost` is in the currency of the result, None where
    nobody told. `parted` is where the text leaves the first run's, None where it does not."""

    id: str
    request_id: str
    correct: bool
    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    mode: str = ""
    arm: str = ""
    failure: str = ""
    cost: float | None = None
    parted: Parting | None = None


class Way(msgspec.Struct, frozen=True):
    """How requests are to be served: by a mode, or by an arm of the server's experiment; empty
    where the server chooses."""

    mode: str = ""
    arm: str = ""

    @property
    def name(self) -> str:
        return self.mode or self.arm or "default"

    @property
    def headers(self) -> dict[str, str]:
        """Those that ask for it."""
        asked = {"x-pdserve-mode": self.mode, "x-pdserve-arm": self.arm}
        return {name: value for name, value in asked.items() if value}


class Run(msgspec.Struct, frozen=True):
    """All cases, asked one way."""

    asked: Way
    answers: tuple[Graded, ...]

    @property
    def name(self) -> str:
        return self.asked.name

    @property
    def correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def failed(self) -> int:
        return sum(bool(answer.failure) for answer in self.answers)

    @property
    def near_ties(self) -> tuple[Graded, ...]:
        """Answers that leave those of the first run where rounding explains it."""
        return tuple(one for one in self.answers if one.parted and one.parted.is_near_tie)

    @property
    def faults(self) -> tuple[Graded, ...]:
        """Those of which it does not."""
        return tuple(one for one in self.answers if one.parted and one.parted.is_fault)

    @property
    def untold(self) -> int:
        """Those of which nothing tells whether it does."""
        return sum(one.parted is not None and one.parted.gap is None for one in self.answers)

    @property
    def cost(self) -> float | None:
        """None where any answer's is unknown; one that failed costs nothing that is known of."""
        costs = [answer.cost for answer in self.answers if not answer.failure]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    @property
    def cost_per_correct(self) -> float | None:
        """None where it is unknown, or no answer was right."""
        return None if self.cost is None or not self.correct else self.cost / self.correct


class Result(msgspec.Struct, frozen=True):
    """`at` is in ISO 8601."""

    suite: str
    digest: str
    model: str
    at: str
    currency: str
    runs: tuple[Run, ...]


class Paired(msgspec.Struct, frozen=True):
    """Two runs of the same cases: `lost` were right in the first alone, `won` in the second
    alone; `p_value` is McNemar's, exact and two-sided; `alike` have the same text."""

    cases: int
    lost: tuple[str, ...]
    won: tuple[str, ...]
    p_value: float
    alike: int

    @property
    def differs(self) -> bool:
        return self.p_value < ALPHA

    @property
    def is_worse(self) -> bool:
        return self.differs and len(self.lost) > len(self.won)


def paired(first: Run, second: Run) -> Paired:
    """By the ids of the cases that both have."""
    before = {answer.id: answer for answer in first.answers}
    pairs = [(before[now.id], now) for now in second.answers if now.id in before]
    lost = tuple(now.id for was, now in pairs if was.correct and not now.correct)
    won = tuple(now.id for was, now in pairs if now.correct and not was.correct)
    alike = sum(was.text == now.text and not now.failure for was, now in pairs)
    return Paired(len(pairs), lost, won, mcnemar(len(lost), len(won)), alike)


def mcnemar(lost: int, won: int) -> float:
    """How often chance alone would part so many discordant pairs at least as unevenly: twice
    the tail of a fair coin's binomial (McNemar, Psychometrika 1947, in its exact form)."""
    pairs, fewer = lost + won, min(lost, won)
    tail = sum(comb(pairs, heads) for heads in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**pairs))


def baseline_of(run: Run, baseline: Result, now: Result) -> Run:
    """What to compare a run with. Raises ConfigError for a baseline of another suite."""
    if baseline.digest != now.digest:
        raise ConfigError(
            f"the baseline is of another suite, or of another version of it: {baseline.suite} "
            f"{baseline.digest}, not {now.suite} {now.digest}"
        )
    same: Sequence[Run] = [each for each in baseline.runs if each.asked == run.asked]
    return (*same, *baseline.runs)[0]


def to_json(result: Result) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def from_json(data: bytes) -> Result:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(data, type=Result)
    except msgspec.DecodeError as error:
        raise ConfigError(f"no result of pdserve eval: {error}") from None
