"""The state table of a request: what is legal, what is not, and that every life can end."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from coordinator.lifecycle import TABLE, TERMINAL, Event, IllegalEventError, State, advance
from coordinator.record import RequestRecord

ROOT = Path(__file__).parents[2]
LEGAL = [(state, event, after) for state in State for event, after in TABLE[state].items()]
ILLEGAL = [(state, event) for state, event in product(State, Event) if event not in TABLE[state]]
GOOD_LIVES = {
    "colocated": "plan start first_token finish",
    "disaggregated": "plan reserve prefill start first_token finish",
    "no room, then colocated": "plan reserve fall_back start first_token finish",
    "prefill failed, then another": (
        "plan reserve prefill fall_back reserve prefill start first_token finish"
    ),
    "hand-off failed, then colocated": (
        "plan reserve prefill start fall_back start first_token finish"
    ),
}


def record() -> RequestRecord:
    return RequestRecord("r1", "http", "chat", False, "", 0.0)


@pytest.mark.parametrize(("state", "event", "after"), LEGAL)
def test_a_legal_event_leads_on(state: State, event: Event, after: State) -> None:
    assert advance(state, event) is after


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(state: State, event: Event) -> None:
    told = record()
    told.state = state
    with pytest.raises(IllegalEventError, match=f"{event} in state {state}"):
        told.apply(event)
    assert told.state is state


@pytest.mark.parametrize("events", GOOD_LIVES.values(), ids=GOOD_LIVES.keys())
def test_a_good_life_finishes(events: str) -> None:
    told = record()
    for event in events.split():
        told.apply(Event(event))
    assert told.state is State.FINISHED


def test_every_state_can_be_reached() -> None:
    reached = {State.QUEUED}
    while more := {after for state in reached for after in TABLE[state].values()} - reached:
        reached |= more
    assert reached == set(State)


@pytest.mark.parametrize("state", [state for state in State if state not in TERMINAL])
def test_every_state_on_the_way_can_fail_and_be_cancelled(state: State) -> None:
    assert advance(state, Event.FAIL) is State.FAILED
    assert advance(state, Event.CANCEL) is State.CANCELLED


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_follows_an_end(state: State) -> None:
    assert not TABLE[state]


def test_nothing_finishes_without_a_first_token() -> None:
    assert [state for state in State if Event.FINISH in TABLE[state]] == [State.STREAMING]


def test_the_diagram_in_the_docs_is_this_table() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = text.split("<!-- lifecycle -->")[1].split("<!-- /lifecycle -->")[0]
    arrows = {line.strip() for line in drawn.splitlines() if ": " in line}
    ends = {Event.FAIL, Event.CANCEL}
    assert arrows == {
        f"{state} --> {after}: {event}" for state, event, after in LEGAL if event not in ends
    }
