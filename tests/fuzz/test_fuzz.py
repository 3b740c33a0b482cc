"""The short form of `make fuzz`, with the same requests each time."""

from __future__ import annotations

from tests.fuzz.runner import run
from tests.fuzz.system import running


def test_whatever_is_asked_is_answered_as_documented_and_leaves_nothing() -> None:
    with running() as system:
        run(system, 120, 1)
        assert system.tally.total >= 100
        served = {name for name, status in system.tally.answers if status[:3] in ("200", "OK")}
    assert served >= {
        *("POST /v1/chat/completions", "POST /v1/completions"),
        *("Generate", "GenerateStream", "Chat", "ChatStream", "ListModels"),
    }
