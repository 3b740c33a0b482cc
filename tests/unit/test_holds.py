"""Blocks that are given out over gRPC: what a reader is given, and told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.engine.kv import holds
from pdserve.engine.kv.holds import Hold, HoldTable
from pdserve.errors import ErrorReason, PrefillError
from pdserve.types import LeaseEnd
from tests.support.patience import WITHIN_S

NUM_TOKENS = 219


def test_every_end_has_a_refusal() -> None:
    assert holds._REFUSALS.keys() == set(LeaseEnd)


def test_ends_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "REMEMBERED", 2)
    monkeypatch.setattr(holds, "UNSEEN_S", 0.0)
    table = HoldTable()
    for name in "abc":
        table.open(Hold(name, NUM_TOKENS, 7))
        table.close(name, LeaseEnd.RELEASED)

    def refusal(name: str) -> ErrorReason:
        with pytest.raises(PrefillError) as caught:
            table.find(name, lambda: True)
        return caught.value.reason

    assert [refusal(name) for name in "abcd"] == [
        ErrorReason.KV_FOREIGN,
        ErrorReason.KV_EXPIRED,
        ErrorReason.KV_EXPIRED,
        ErrorReason.KV_FOREIGN,
    ]


def test_what_is_rewound_while_it_is_sent_is_never_taken_from_the_old_blocks() -> None:
    hold = Hold("t", NUM_TOKENS, 2)
    hold.extend([1, 2], 2, lambda: None)
    assert hold.wait(0, lambda: True) == 2
    hold.rewind()
    asked = threading.Event()

    def alive() -> bool:
        asked.set()
        return True

    with ThreadPoolExecutor(1) as reader:
        copied = reader.submit(hold.copy, 0, 2, alive, lambda blocks: blocks)
        assert asked.wait(WITHIN_S)
        hold.extend([8, 9], 2, lambda: None)
        assert copied.result(WITHIN_S) == [8, 9]


def test_a_hold_that_nobody_fetches_runs_out() -> None:
    now = [0.0]
    table = HoldTable(lambda: now[0])
    table.open(Hold("t", NUM_TOKENS, 7))
    now[0] = 100
    assert table.sweep() == {}, "it is being read"
    table.expire_at("t", 5)
    now[0] = 104
    table.expire_at("t", 5)
    now[0] = 108
    assert table.sweep() == {}
    now[0] = 109
    assert table.sweep() == {"t": LeaseEnd.EXPIRED}
    assert table.get("t") is None
