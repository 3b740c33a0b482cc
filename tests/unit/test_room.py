"""Room accounting: what is promised fits, what is colocated may wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.room import Room


def begins() -> None:
    """What a sequence does whose begin does not matter."""


def room(
    *,
    reserved: dict[str, int] | None = None,
    held: dict[str, int] | None = None,
    colocated: dict[str, int] | None = None,
) -> Room:
    made = Room(lambda: 100)
    for key, tokens in (reserved or {}).items():
        assert made.reserve(key, tokens)
    for key, tokens in (held or {}).items():
        assert made.hold(key, tokens)
    for key, tokens in (colocated or {}).items():
        assert made.commit(key, tokens, begins)
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
    assert not made.commit("a", 101, begins)
    assert made.charged_tokens == 0


def test_a_reserved_sequence_begins_in_its_own_room() -> None:
    made = room(reserved={"a": 60}, colocated={"b": 90})
    assert made.commit("a", 60, begins)
    assert made.charged_tokens == 150


def test_less_than_was_reserved_gives_the_rest_back() -> None:
    made = room(reserved={"a": 60})
    assert made.commit("a", 50, begins)
    assert made.charged_tokens == 50


def test_more_than_was_reserved_is_granted_only_where_it_fits() -> None:
    assert room(reserved={"a": 50, "b": 40}).commit("a", 60, begins)
    made = room(reserved={"a": 50, "b": 40})
    assert not made.commit("a", 61, begins)
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


# Beside prompts that are held for others.


def test_without_held_prompts_every_colocated_sequence_begins_at_once() -> None:
    begun: list[str] = []
    made = room(reserved={"a": 90})
    for key in ("b", "c"):
        assert made.commit(key, 60, lambda key=key: begun.append(key))  # type: ignore[misc]
    assert begun == ["b", "c"]
    assert made.waiting == 0


def test_beside_a_held_prompt_a_colocated_sequence_begins_when_it_fits() -> None:
    begun: list[str] = []
    made = room(held={"h": 60}, reserved={"r": 30})
    assert made.commit("fits", 10, lambda: begun.append("fits"))
    assert made.commit("a", 30, lambda: begun.append("a"))
    assert begun == ["fits"]
    assert made.waiting == 1
    assert made.charged_tokens == 130
    made.release("r")
    assert begun == ["fits", "a"]
    assert made.waiting == 0


def test_waiting_sequences_begin_in_order_of_arrival() -> None:
    begun: list[str] = []
    made = room(held={"h": 60, "g": 10})
    for key, tokens in (("a", 50), ("b", 10), ("c", 90)):
        assert made.commit(key, tokens, lambda key=key: begun.append(key))  # type: ignore[misc]
    assert begun == []  # though the second would fit
    made.release("h")
    assert begun == ["a", "b"]
    made.release("g")  # what does not fit may wait in the engine from now on
    assert begun == ["a", "b", "c"]


def test_nothing_is_promised_or_held_while_a_colocated_sequence_waits() -> None:
    made = room(held={"h": 60}, colocated={"a": 50})
    assert not made.reserve("b", 1)
    assert not made.hold("c", 1)
    made.release("a")
    assert made.reserve("b", 1)


def test_a_promised_sequence_begins_though_others_wait() -> None:
    begun: list[str] = []
    made = room(held={"h": 60}, reserved={"r": 40}, colocated={"a": 50})
    assert made.commit("r", 40, lambda: begun.append("r"))
    assert begun == ["r"]
    assert made.waiting == 1


def test_a_waiting_sequence_that_leaves_never_begins_and_makes_place() -> None:
    begun: list[str] = []
    made = room(held={"h": 60})
    assert made.commit("a", 50, lambda: begun.append("a"))
    assert made.commit("b", 40, lambda: begun.append("b"))
    assert made.release("a") == 50
    assert begun == ["b"]
    made.release("h")
    assert begun == ["b"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "hold", "commit", "release"]),
            st.integers(0, 5),
            st.integers(1, 120),
        )
    )
)
def test_what_is_held_stands_beside_sequences_that_all_fit(
    steps: list[tuple[str, int, int]],
) -> None:
    """Each key begins once, as a sequence does."""
    made = Room(lambda: 100)
    charges: dict[int, int] = {}
    held: set[int] = set()
    committed: set[int] = set()
    waiting: set[int] = set()

    def forget(key: int) -> int | None:
        for keys in (held, committed, waiting):
            keys.discard(key)
        return charges.pop(key, None)

    for step, key, tokens in steps:
        if step == "release":
            expected = forget(key)
            assert made.release(key) == expected
        elif step == "commit":
            if key in committed:
                continue
            forget(key)
            waiting.add(key)
            if made.commit(key, tokens, lambda key=key: waiting.discard(key)):  # type: ignore[misc]
                charges[key] = tokens
                committed.add(key)
            else:
                waiting.discard(key)
        elif key not in charges and getattr(made, step)(key, tokens):
            charges[key] = tokens
            held |= {key} if step == "hold" else set()
        assert made.charged_tokens == sum(charges.values())
        assert made.waiting == len(waiting)
        if held:
            assert sum(charges[each] for each in charges.keys() - waiting) <= 100
        else:
            assert not waiting
