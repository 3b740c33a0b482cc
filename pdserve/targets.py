"""The latencies that are aimed at where nobody says otherwise, in seconds: by routing and
experiments, by load tests, plans and simulations."""

TTFT_S = 2.0
"""From a request's arrival to its first token."""

ITL_S = 0.1
"""From one token of an answer to the next."""
