"""What came of one slot of an experiment's arm. Pure but for its own memory."""

from __future__ import annotations

from typing import Any

from coordinator import histogram

_SHARES = (0.5, 0.9, 0.99)


class Tally:
    """Of the requests that arrived in `seconds` of the slot; it is whole when the slot is over
    and none of them is `open`."""

    def __init__(self, model: str, block: int, arm: str, *, ends_at: float, seconds: float) -> None:
        self.model = model
        self.block = block
        self.arm = arm
        self.ends_at = ends_at
        self.open = 0
        self._seconds = seconds
        self._asked = 0
        self._good = 0
        self._good_tokens = 0
        self._ttft = histogram.empty()
        self._gaps = histogram.empty()

    def count(self, good: bool, tokens: int, ttft_s: float | None, gaps: list[int]) -> None:
        """A request that ended; `gaps` are its times between tokens, in fine buckets."""
        self._asked += 1
        if good:
            self._good += 1
            self._good_tokens += tokens
        if ttft_s is not None:
            histogram.add(self._ttft, ttft_s)
        self._gaps = [ours + its for ours, its in zip(self._gaps, gaps, strict=True)]

    def told(self) -> dict[str, Any]:
        """As JSON; latencies as 50th, 90th and 99th percentile, null where there is none."""
        return {
            "block": self.block,
            "arm": self.arm,
            "asked": self._asked,
            "good": self._good,
            "good_tokens": self._good_tokens,
            "seconds": self._seconds,
            "ttft_s": _quantiles(self._ttft),
            "itl_s": _quantiles(self._gaps),
        }


def _quantiles(counts: list[int]) -> list[float] | None:
    found = [histogram.quantile(counts, share) for share in _SHARES]
    values = [round(value, 6) for value in found if value is not None]
    return values or None
