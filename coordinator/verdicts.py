"""What experiments show by now, for who looks every two seconds: worked out once a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pdserve.ab.report import Comparison, decide
from pdserve.ab.slots import experiment

_Seen = tuple[Any, ...]


class Verdicts:
    """Of each model's experiment; in a thread, for it is work while tokens wait."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[_Seen, list[dict[str, Any]]]] = {}

    async def of(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first arm beside each other one, from the JSON of a report, as JSON. `goodput` is
        the relative difference: its least, its middle and its greatest value, the last of them
        infinite where nothing is known."""
        model = report["model"]
        arms = [(arm["gpus"], arm["stopped"]) for arm in report["arms"]]
        seen = report["seed"], len(report["slots"]), arms
        known = self._last.get(model)
        if known is None or known[0] != seen:
            found = await asyncio.to_thread(decide, experiment(report))
            known = self._last[model] = seen, [_told(one) for one in found]
        return known[1]


def _told(one: Comparison) -> dict[str, Any]:
    change = one.goodput.change
    return {
        "first": one.first.name,
        "other": one.other.name,
        "blocks": one.blocks,
        "requests": one.requests,
        "verdict": one.verdict,
        "goodput": [change.low, change.middle, change.high],
    }
