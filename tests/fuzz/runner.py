"""Runs both fuzzers for so many requests of each operation."""

from __future__ import annotations

from hypothesis import HealthCheck, seed, settings

from tests.fuzz import http, rpc
from tests.fuzz.system import System

# By operation; others than these give little to vary.
_SHARES = {
    "POST /v1/chat/completions": 0.25,
    "POST /v1/completions": 0.2,
    "POST /tokenize": 0.05,
    "POST /detokenize": 0.05,
    "Generate": 0.1,
    "GenerateStream": 0.1,
    "Chat": 0.1,
    "ChatStream": 0.1,
}
_OTHERS = 0.01


def run(system: System, num_requests: int, number: int) -> None:
    """Sends about so many; `number` is the seed. Raises what the first broken promise raised."""
    for name, ask in (*http.fuzz(system), *rpc.fuzz(system)):
        examples = max(1, round(num_requests * _SHARES.get(name, _OTHERS)))
        bounded = settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        seed(number)(bounded(ask))()
        system.assert_idle()
