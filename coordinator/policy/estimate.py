"""What the fleet's engines take, learnt from what they report. Pure but for its own memory.

An engine step takes `step_s`, and `token_s` for each prompt token that it reads, `pair_s` for
each token that such a token comes after (attention), `sequence_s` for each sequence that it
writes, and `context_s` for each token of theirs in the cache. Reports add up many steps, and
the sums obey the same line, so one fit serves all: weighted least squares without negative
weights, solved coordinate by coordinate (Franc, Hlaváč, Navara: Sequential Coordinate-Wise
Algorithm for the Non-negative Least Squares Problem, 2005), forgetting exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.types import EngineWork

MEMORY_S = 300.0
"""Seconds of observed time after which an observation counts 1/e."""
REFIT_SHARE = 0.02
"""Part of what is remembered that must be new before it is fitted again."""
SWEEPS = 200
SHORTEST_STEP_S = 1e-5
"""No engine makes a step in less, whatever it reports."""
MOST_TOKENS = 10_000_000
"""No step reads or writes more, and no sequence is longer."""
PRIOR_S = 0.02
"""Seconds of observation that the prior counts for."""
LEARNT_TOKENS = 2_000
LEARNT_SEQUENCES = 50
LEARNT_HAND_OVERS = 5
ANSWER_SHARE = 0.02
"""Weight of the newest answer's length in the mean."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The seconds that engines of one pool take, as in the module's text; a GPU's until learnt.

    `reads_learnt` and `writes_learnt` say whether enough was seen to believe what is said of
    prompts, and of answers.
    """

    step_s: float = 0.01
    token_s: float = 1e-4
    pair_s: float = 1e-9
    sequence_s: float = 1e-4
    context_s: float = 5e-8
    reads_learnt: bool = False
    writes_learnt: bool = False

    def reading_s(self, tokens: float, pairs: float) -> float:
        """What it adds to steps that so many prompt tokens are read in them."""
        return self.token_s * tokens + self.pair_s * pairs


@dataclass(frozen=True, slots=True)
class HandOver:
    """From the end of a prefill to the first step of the decode worker: `base_s`, and `token_s`
    for each prompt token."""

    base_s: float = 0.02
    token_s: float = 2e-6
    learnt: bool = False


@dataclass(frozen=True, slots=True)
class Estimates:
    """All that is believed of one model's fleet; `answer_tokens` is the mean answer's length."""

    pools: Mapping[str, Timings] = field(default_factory=dict)
    hand_over: HandOver = field(default_factory=HandOver)
    answer_tokens: float = 128.0

    def of(self, pool: str) -> Timings:
        return self.pools.get(pool, _PRIOR)


_PRIOR = Timings()
_HAND_OVER = HandOver()
_PRIOR_WORK = (
    _PRIOR.step_s,
    _PRIOR.token_s,
    _PRIOR.pair_s,
    _PRIOR.sequence_s,
    _PRIOR.context_s,
)
# The most that each may be expected to be, on a CPU: only so much is a prior held on to.
_LARGE_WORK = (0.5, 5e-3, 1e-6, 1e-2, 1e-5)
_PRIOR_HAND_OVER = (_HAND_OVER.base_s, _HAND_OVER.token_s)
_LARGE_HAND_OVER = (1.0, 1e-3)


class Fit:
    """Non-negative weights w for which x·w comes near to y, by observations of x and y > 0.

    An observation's error is taken to grow with the root of y, or of what was expected if that is
    more, as that of a sum of y / s steps does: none that is far too short weighs more for it.
    `large` are weights that would be large: the prior counts as PRIOR_S seconds with them.
    """

    def __init__(self, prior: tuple[float, ...], large: tuple[float, ...]) -> None:
        self._prior = prior
        self._ridge = tuple(PRIOR_S / weight**2 for weight in large)
        self._products = [[0.0] * len(prior) for _ in prior]
        self._sums = [0.0] * len(prior)
        self._seen = 0.0
        self._new = 0.0
        self.weights = prior

    def observe(self, x: tuple[float, ...], y: float) -> bool:
        """Whether the weights were fitted anew."""
        kept = math.exp(-y / MEMORY_S)
        variance = max(y, sum(w * value for w, value in zip(self.weights, x, strict=True)))
        for i, (row, value) in enumerate(zip(self._products, x, strict=True)):
            self._sums[i] = self._sums[i] * kept + value * y / variance
            for j, other in enumerate(x):
                row[j] = row[j] * kept + value * other / variance
        self._seen = self._seen * kept + y
        self._new += y
        if self._new < REFIT_SHARE * self._seen:
            return False
        self._new = 0.0
        self.weights = self._solve()
        return True

    def _solve(self) -> tuple[float, ...]:
        weights = list(self.weights)
        for _ in range(SWEEPS):
            moved = 0.0
            for i, row in enumerate(self._products):
                before = weights[i]
                rest = sum(a * w for a, w in zip(row, weights, strict=True)) - row[i] * before
                pull = self._sums[i] + self._ridge[i] * self._prior[i] - rest
                weights[i] = max(0.0, pull / (row[i] + self._ridge[i]))
                moved = max(moved, abs(weights[i] - before) / (weights[i] + before or 1.0))
            if moved < 1e-4:
                break
        return tuple(weights)


@dataclass(slots=True)
class _Pool:
    fit: Fit = field(default_factory=lambda: Fit(_PRIOR_WORK, _LARGE_WORK))
    tokens: int = 0
    sequences: int = 0


class Estimator:
    """Learns one model's fleet, pool by pool; a pool is the workers of the same roles."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._hand_over = Fit(_PRIOR_HAND_OVER, _LARGE_HAND_OVER)
        self._hand_overs = 0
        self._answer_tokens = Estimates().answer_tokens
        self._estimates: Estimates | None = None

    @property
    def estimates(self) -> Estimates:
        if self._estimates is None:
            base_s, token_s = self._hand_over.weights
            self._estimates = Estimates(
                {name: _timings(pool) for name, pool in self._pools.items()},
                HandOver(base_s, token_s, self._hand_overs >= LEARNT_HAND_OVERS),
                self._answer_tokens,
            )
        return self._estimates

    def observe_work(self, pool: str, work: EngineWork, capacity_tokens: int) -> bool:
        """Takes what a worker of the pool, with a cache of that size, did since the last time;
        whether it is believed, for one report of nonsense must not spoil what others taught."""
        if not _is_possible(work):
            return False
        known = self._pools.setdefault(pool, _Pool())
        learnt = known.tokens < LEARNT_TOKENS or known.sequences < LEARNT_SEQUENCES
        known.tokens += work.prefill_tokens
        known.sequences += work.sequences
        x = (
            work.steps,
            work.prefill_tokens,
            work.prefill_pairs,
            work.sequences,
            work.kv_usage * capacity_tokens,
        )
        if known.fit.observe(x, work.seconds) or learnt:
            self._estimates = None
        return True

    def observe_hand_over(self, num_tokens: int, seconds: float) -> None:
        """Takes the time from a prompt's prefill to the decode worker's first step."""
        if not seconds <= MEMORY_S:
            return
        self._hand_overs += 1
        if self._hand_over.observe((1.0, num_tokens), max(seconds, 1e-4)):
            self._estimates = None

    def observe_answer(self, num_tokens: int) -> None:
        self._answer_tokens += ANSWER_SHARE * (num_tokens - self._answer_tokens)
        self._estimates = None


def _is_possible(work: EngineWork) -> bool:
    """Whether an engine can have done that since its last report."""
    return (
        0 < work.steps <= MEMORY_S / SHORTEST_STEP_S
        and SHORTEST_STEP_S * work.steps <= work.seconds <= MEMORY_S
        and 0 <= work.prefill_tokens <= MOST_TOKENS * work.steps
        and 0 <= work.prefill_pairs <= MOST_TOKENS * work.prefill_tokens
        and 0 <= work.sequences <= MOST_TOKENS * work.steps
        and 0 <= work.kv_usage <= work.steps + 1
    )


def _timings(pool: _Pool) -> Timings:
    step_s, token_s, pair_s, sequence_s, context_s = pool.fit.weights
    return Timings(
        step_s=max(step_s, SHORTEST_STEP_S),
        token_s=token_s,
        pair_s=pair_s,
        sequence_s=sequence_s,
        context_s=context_s,
        reads_learnt=pool.tokens >= LEARNT_TOKENS,
        writes_learnt=pool.sequences >= LEARNT_SEQUENCES,
    )
