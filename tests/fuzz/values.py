"""Values that a request may well have, so that not all of them are refused at the first field."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_tokens = st.integers(0, 257)
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 40),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 100),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=16),
    "stop_token_ids": st.lists(_tokens, max_size=8),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "min_tokens": st.integers(0, 1),
    "logit_bias": st.dictionaries(_tokens, st.floats(-100, 100), max_size=8),
    "cache_salt": st.text(max_size=256),
    "priority": st.integers(0, 9),
}
"""By field, those that a simulated engine takes, too."""
