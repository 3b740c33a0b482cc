"""Quantiles from buckets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import histogram


@given(st.lists(st.floats(0.001, 500), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_that_of_the_samples_within_a_tenth(
    samples: list[float], share: float
) -> None:
    counts = histogram.empty()
    for sample in samples:
        histogram.add(counts, sample)
    exact = float(np.quantile(samples, share, method="inverted_cdf"))
    assert histogram.quantile(counts, share) == pytest.approx(exact, rel=0.101)


def test_nothing_has_no_quantile_and_what_is_beyond_all_has_the_last_bound() -> None:
    counts = histogram.empty()
    assert histogram.quantile(counts, 0.5) is None
    histogram.add(counts, 1e6)
    assert histogram.quantile(counts, 0.5) == histogram.FINE_BUCKETS[-1]
