"""What those can take who read prompts, summed up for admission. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policy.admission import WINDOW_STEPS
from coordinator.policy.estimate import Estimates
from coordinator.policy.snapshot import WorkerView
from coordinator.policy.ticket import Pool


def pool_of(readers: Sequence[WorkerView], estimates: Estimates) -> Pool:
    """All of them together."""
    chunk_tokens = piled_tokens = 0
    tokens_per_s = 0.0
    for view in readers:
        chunk = view.chunk_tokens
        timings = estimates.of(view.pool)
        chunk_tokens += chunk
        tokens_per_s += chunk / (timings.step_s + timings.token_s * chunk)
        own = WINDOW_STEPS * chunk
        # As they count in the window: half of a worker's part each, at most.
        counted = min(view.outstanding_tokens, view.outstanding_prompts * own // 2)
        piled_tokens += max(0, counted - own)
    return Pool(len(readers), chunk_tokens, tokens_per_s, piled_tokens)
