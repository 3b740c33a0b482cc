"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

# No deadline: machines are shared, and a slow example is no wrong one.
settings.register_profile("pdserve", deadline=None, max_examples=50)
settings.load_profile("pdserve")
