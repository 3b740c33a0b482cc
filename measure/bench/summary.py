"""What a target's answers come to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure.bench.answer import Answer
from measure.stats import Percentiles, percentiles


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds: to the first token, and a token after it on average."""

    ttft_s: float
    tpot_s: float

    def met(self, answer: Answer) -> bool:
        return not answer.failure and answer.first_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Summary:
    """`goodput` is requests a second that met both targets, over the time in which they were due;
    `late_p99_s` is how late the client sent them, a fault of the client alone.

    Percentiles are seconds, of the answers that came to their end; None without one.
    """

    requests: int
    failures: dict[str, int]
    modes: dict[str, int]
    ttft: Percentiles | None
    itl: Percentiles | None
    good: int
    goodput: float
    tokens_per_s: float
    late_p99_s: float


def summarise(answers: Sequence[Answer], targets: Targets, seconds: float) -> Summary:
    """Of `answers` that were due within `seconds`; at least one."""
    whole = [answer for answer in answers if not answer.failure]
    good = sum(map(targets.met, answers))
    return Summary(
        requests=len(answers),
        failures=dict(Counter(answer.failure for answer in answers if answer.failure)),
        modes=dict(Counter(answer.mode for answer in whole if answer.mode)),
        ttft=percentiles([answer.first_s for answer in whole]),
        itl=percentiles([gap for answer in whole for gap in answer.gaps_s]),
        good=good,
        goodput=good / seconds,
        tokens_per_s=sum(answer.answer_tokens for answer in whole) / seconds,
        late_p99_s=float(np.percentile([answer.late_s for answer in answers], 99)),
    )
