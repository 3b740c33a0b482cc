"""The classes of requests: who goes first where some must wait."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def weight(self) -> float:
        """Its part of what is read while others wait: even the lowest is never starved."""
        return _WEIGHTS[self]


_WEIGHTS = {Priority.HIGH: 16.0, Priority.NORMAL: 4.0, Priority.LOW: 1.0}


def lower(one: Priority, other: Priority) -> Priority:
    return min(one, other, key=lambda priority: priority.weight)


def priority_of(number: int) -> Priority:
    """The class of a request's `priority`, which is the lower the sooner, as in vLLM."""
    if number == 0:
        return Priority.NORMAL
    return Priority.HIGH if number < 0 else Priority.LOW
