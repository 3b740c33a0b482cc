"""The life of a request as data: state, event, next state. No I/O here.

The diagram in docs/architecture.md is drawn from this table.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    PLANNED = "planned"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    PLAN = "plan"
    RESERVE = "reserve"
    PREFILL = "prefill"
    FALL_BACK = "fall_back"
    START = "start"
    FIRST_TOKEN = "first_token"  # noqa: S105  (not that kind of token)
    RECOVER = "recover"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

_ENDS = {Event.FAIL: State.FAILED, Event.CANCEL: State.CANCELLED}

TABLE: dict[State, dict[Event, State]] = {
    State.QUEUED: {Event.PLAN: State.PLANNED, **_ENDS},
    State.PLANNED: {
        Event.RESERVE: State.RESERVING,
        Event.START: State.DECODING,
        Event.FALL_BACK: State.PLANNED,
        **_ENDS,
    },
    State.RESERVING: {Event.PREFILL: State.PREFILLING, Event.FALL_BACK: State.PLANNED, **_ENDS},
    State.PREFILLING: {Event.START: State.DECODING, Event.FALL_BACK: State.PLANNED, **_ENDS},
    State.DECODING: {Event.FIRST_TOKEN: State.STREAMING, Event.FALL_BACK: State.PLANNED, **_ENDS},
    State.STREAMING: {Event.FINISH: State.FINISHED, Event.RECOVER: State.PLANNED, **_ENDS},
    State.FINISHED: {},
    State.FAILED: {},
    State.CANCELLED: {},
}


class IllegalEventError(Exception):
    """An event that the state does not allow; the state is unchanged."""


def advance(state: State, event: Event) -> State:
    """The state after `event`.

    Raises IllegalEventError where the table has no such row: a fault of pdserve.
    """
    try:
        return TABLE[state][event]
    except KeyError:
        raise IllegalEventError(f"{event} in state {state}") from None
