"""Whether a prompt is read by the decode worker itself or elsewhere: three deciders. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.policy.candidates import Candidates
from coordinator.policy.forecast import Route
from pdserve.types import Mode

TRIED_EVERY = 8
"""While estimates are not learnt, one request in so many goes the other way."""


class Decision(NamedTuple):
    """`mode` is never AUTO; `why` is in words, empty where it was fixed."""

    mode: Mode
    why: str


def decide(mode: Mode, candidates: Candidates) -> Decision:
    """A fixed mode stays; AUTO is what the model's decider makes of it."""
    if mode is not Mode.AUTO:
        return Decision(mode, "")
    return _DECIDERS[candidates.policy.decider](candidates)


def by_threshold(candidates: Candidates) -> Decision:
    """Long prompts are read elsewhere, as far as they are not cached."""
    facts, least = candidates.facts, candidates.policy.min_prefill_tokens
    cached = facts.cached_tokens.get(candidates.colocated.worker_id, 0)
    uncached = facts.prompt_tokens - cached
    split = uncached >= least
    words = f"{uncached} uncached prompt tokens {'>=' if split else '<'} {least}"
    return Decision(Mode.DISAGGREGATED if split else Mode.COLOCATED, words)


def by_estimate(candidates: Candidates) -> Decision:
    """The route that costs less, of the request's own latency and of others'.

    By threshold until enough was seen of both, and where there is but one. Traffic that is all
    short, or all long, would never show the other route: some of it goes there to be learnt from.
    """
    if candidates.pair is None:
        return by_threshold(candidates)
    forecast = candidates.forecast
    if not forecast.learnt(*candidates.pair):
        mode, why = by_threshold(candidates)
        if (candidates.turn + 1) % TRIED_EVERY == 0:
            mode = Mode.COLOCATED if mode is Mode.DISAGGREGATED else Mode.DISAGGREGATED
            return Decision(mode, f"{why}, but this one goes the other way, to learn what it takes")
        return Decision(mode, f"{why} (estimates not learnt yet)")
    colocated = forecast.colocated(candidates.colocated)
    disaggregated = forecast.disaggregated(*candidates.pair)
    split = disaggregated.cost < colocated.cost
    words = f"colocated {_words(colocated)}, disaggregated {_words(disaggregated)}"
    return Decision(Mode.DISAGGREGATED if split else Mode.COLOCATED, words)


def _words(route: Route) -> str:
    reading = route.reading
    held = "nobody up"
    if reading.harmed:
        answers = "answer" if reading.harmed == 1 else "answers"
        held = f"up {reading.harmed} running {answers} by {reading.added_s * 1000:.0f} ms a step"
    return f"would start in {route.start_s:.2f} s and hold {held} (cost {route.cost:.2f})"


_DECIDERS: dict[str, Callable[[Candidates], Decision]] = {
    "threshold": by_threshold,
    "estimate": by_estimate,
}
