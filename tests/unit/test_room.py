"""Room accounting: what is promised fits, what is colocated may wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.room import Room


def room(
    *, reserved: dict[str, int] | None = None, colocated: dict[str, int] | None = None
) -> Room:
    made = Room(lambda: 100)
    for key, tokens in (reserved or {}).items():
        assert made.reserve(key, tokens)
    for key, tokens in (colocated or {}).items():
        assert made.commit(key, tokens)
    return made


def test_room_is_promised_up_to_the_capacity() -> None:
    made = room(reserved={"a": 60})
    assert not made.reserve("b", 41)
    assert made.charged_tokens == 60
    assert made.reserve("b", 40)


def test_running_sequences_count_against_promises() -> None:
    assert not room(colocated={"a": 60}).reserve("b", 41)


def test_colocated_sequences_may_exceed_the_capacity_together() -> None:
    made = room(colocated={"a": 60, "b": 60})
    assert made.charged_tokens == 120
    assert not made.reserve("c", 1)
    made.release("a")
    assert made.reserve("c", 40)


def test_a_colocated_sequence_that_could_never_fit_is_refused() -> None:
    made = room()
    assert not made.commit("a", 101)
    assert made.charged_tokens == 0


def test_a_reserved_sequence_begins_in_its_own_room() -> None:
    made = room(reserved={"a": 60}, colocated={"b": 90})
    assert made.commit("a", 60)
    assert made.charged_tokens == 150


def test_less_than_was_reserved_gives_the_rest_back() -> None:
    made = room(reserved={"a": 60})
    assert made.commit("a", 50)
    assert made.charged_tokens == 50


def test_more_than_was_reserved_is_granted_only_where_it_fits() -> None:
    assert room(reserved={"a": 50, "b": 40}).commit("a", 60)
    made = room(reserved={"a": 50, "b": 40})
    assert not made.commit("a", 61)
    assert "a" not in made
    assert made.charged_tokens == 40


def test_room_is_given_back_once() -> None:
    made = room(reserved={"a": 60})
    assert made.release("a") == 60
    assert made.release("a") is None
    assert made.charged_tokens == 0


def test_a_key_cannot_be_reserved_twice() -> None:
    with pytest.raises(ValueError, match="reserved twice"):
        room(reserved={"a": 1}).reserve("a", 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "commit", "release"]),
            st.integers(0, 5),
            st.integers(1, 120),
        )
    )
)
def test_the_sum_is_that_of_the_charges(steps: list[tuple[str, int, int]]) -> None:
    made = Room(lambda: 100)
    charges: dict[int, int] = {}
    for step, key, tokens in steps:
        if step == "release":
            assert made.release(key) == charges.pop(key, None)
        elif step == "commit":
            charges.pop(key, None)
            if made.commit(key, tokens):
                charges[key] = tokens
        elif key not in charges and made.reserve(key, tokens):
            charges[key] = tokens
            assert sum(charges.values()) <= 100
        assert made.charged_tokens == sum(charges.values())
