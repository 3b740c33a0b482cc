"""Connections are kept for the next use, but not for ever."""

from __future__ import annotations

from pdserve.engine.kv.connections import Connections


class Log:
    def __init__(self, kept: int) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.connections = Connections[str, str](self.connect, self.closed.append, kept)

    def connect(self, address: str) -> str:
        self.opened.append(address)
        return f"{address} {len(self.opened)}"


def test_a_connection_is_used_again() -> None:
    log = Log(2)
    assert log.connections.to("a", ()) == log.connections.to("a", ()) == "a 1"
    assert (log.opened, log.closed) == (["a"], [])


def test_the_one_that_was_not_asked_for_for_the_longest_time_is_closed() -> None:
    log = Log(2)
    for address in "abac":
        log.connections.to(address, ())
    assert log.closed == ["b 2"]
    assert list(log.connections) == ["a 1", "c 3"]


def test_one_in_use_is_never_closed() -> None:
    log = Log(1)
    for address in "abc":
        log.connections.to(address, "ab")
    assert log.closed == []
    log.connections.to("d", "b")
    # The oldest first, and no more than needed; what is asked for now stays too.
    assert log.closed == ["a 1", "c 3"]
    assert list(log.connections) == ["b 2", "d 4"]


def test_closing_closes_all() -> None:
    log = Log(2)
    for address in "ab":
        log.connections.to(address, ())
    log.connections.close()
    assert sorted(log.closed) == ["a 1", "b 2"]
    assert list(log.connections) == []
