"""What is remembered of requests that ended, and how much of it."""

from __future__ import annotations

import pytest

from coordinator import timelines
from coordinator.record import RequestRecord
from coordinator.timelines import Timelines
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Mode, Route, Usage

NO_ROOM = PdserveError(ErrorReason.NO_ROOM, "full")


class Store:
    """Timelines at a wall clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.timelines = Timelines(lambda: self.now)

    def end(
        self,
        request_id: str,
        *segments: tuple[str, float],
        model: str = "tiny",
        trace_id: str = "t1",
    ) -> None:
        record = RequestRecord(request_id, "http", "chat", True, trace_id, 10.0, model=model)
        record.segments = list(segments)
        self.timelines.ended(record, None, 10.0 + sum(spent for _, spent in segments))


@pytest.fixture
def store() -> Store:
    return Store()


def ids(found: list[timelines.Timeline]) -> list[str]:
    return [it.request_id for it in found]


def test_a_timeline_has_what_is_known_of_the_request(store: Store) -> None:
    record = RequestRecord("r1", "http", "chat", True, "t1", 10.0, model="tiny", tenant="acme")
    record.route = Route(Mode.DISAGGREGATED, "asked for", "blue")
    record.prefill_worker, record.decode_worker = "p", "d"
    record.fallbacks.append("transport: kv_expired")
    record.usage = Usage(7, 3, 2)
    record.prompt_tokens = 7
    record.first_token = 11.0
    record.segments = [("queue", 1.0), ("decode", 2.0)]
    store.timelines.ended(record, NO_ROOM, 13.0)
    (found,) = store.timelines.find("r1")
    assert found == timelines.Timeline(
        request_id="r1",
        trace_id="t1",
        began=store.now - 3.0,
        surface="http",
        operation="chat",
        stream=True,
        model="tiny",
        tenant="acme",
        outcome="no_room",
        error="full",
        mode="disaggregated",
        reason="asked for",
        arm="blue",
        prefill_worker="p",
        decode_worker="d",
        fallbacks=("transport: kv_expired",),
        recoveries=(),
        prompt_tokens=7,
        completion_tokens=3,
        cached_tokens=2,
        ttft_s=1.0,
        duration_s=3.0,
        segments=(("queue", 1.0), ("decode", 2.0)),
    )


def test_the_latest_come_first_and_no_more_than_are_asked_for(store: Store) -> None:
    for name in "abc":
        store.end(name)
    assert ids(store.timelines.recent(2)) == ["c", "b"]
    assert ids(store.timelines.recent(9)) == ["c", "b", "a"]


def test_slow_is_what_waited_long_not_what_answered_long(store: Store) -> None:
    store.end("long", ("queue", 0.5), ("decode", 60.0))
    store.end("held up", ("queue", 2.0), ("decode", 1.0))
    store.end("cut off", ("queue", 0.1), ("decode", 1.0), ("recovery", 3.0), ("decode", 1.0))
    assert ids(store.timelines.slowest()) == ["cut off", "held up", "long"]


def test_what_is_remembered_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "SLOWEST", 2)
    store.end("slowest", ("queue", 9.0))
    for number in range(timelines.RECENT):
        store.end(f"r{number}", ("queue", 1.0 + number / timelines.RECENT))
    assert len(store.timelines.recent(2 * timelines.RECENT)) == timelines.RECENT
    assert ids(store.timelines.slowest()) == ["slowest", f"r{timelines.RECENT - 1}"]
    assert store.timelines.find("slowest"), "it is not recent any more"
    store.end("one more", ("queue", 0.1))
    assert not store.timelines.find("r0")


def test_what_was_slow_is_forgotten_after_an_hour(store: Store) -> None:
    store.end("slow", ("queue", 9.0))
    store.now += timelines.SLOW_FOR_S
    store.end("quick", ("queue", 1.0))
    assert ids(store.timelines.slowest()) == ["quick"]


def test_of_an_id_that_came_twice_the_last_is_found(store: Store) -> None:
    store.end("r", ("queue", 2.0))
    store.end("r", ("queue", 1.0))
    (found,) = store.timelines.find("r")
    assert found.duration_s == 1.0


def test_the_beginning_of_an_id_will_do_where_it_is_that_of_one_request(store: Store) -> None:
    store.end("abc1", trace_id="4bf9")
    store.end("abd2", trace_id="4bf9")
    store.end("ab", trace_id="77aa")
    find = store.timelines.find
    assert ids(find("abd")) == ["abd2"]
    assert ids(find("77")) == ["ab"]
    assert ids(find("ab")) == ["ab"], "a whole id is that request, whatever begins so"
    assert ids(find("a")) == ["ab", "abd2", "abc1"]
    assert ids(find("4bf9")) == ["abd2", "abc1"]
    assert find("b") == []


def test_nothing_is_the_beginning_of_no_id(store: Store) -> None:
    """Such as that of a variable that is not set: it would be any request's."""
    store.end("only")
    assert store.timelines.find("") == []


def test_nobody_without_a_key_fills_it(store: Store) -> None:
    store.end("stranger", model="")
    assert store.timelines.recent(1) == store.timelines.slowest() == []
