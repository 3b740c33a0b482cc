"""Simulated runs of faults: they hold, they repeat, and what is broken on purpose is found."""

from __future__ import annotations

from unittest import mock

import pytest

from coordinator.execution import Execution
from coordinator.gateway.admission import Permit
from coordinator.sequence import Sequence
from measure.simulation.fault_run import play
from measure.simulation.fault_script import FaultKind, script
from pdserve.types import Delta

SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_broken(seed: int) -> None:
    assert play(script(seed)).broken == []


def test_a_probe_that_waits_behind_a_slowed_step_is_no_leak() -> None:
    """It holds blocks and leases for 20 s, when no request has been at work for as long."""
    assert play(script(530051396)).broken == []


def test_a_run_repeats_itself_to_the_letter() -> None:
    for seed in (0, 3, 7):
        first, second = play(script(seed)), play(script(seed))
        assert first.journal == second.journal
        assert first.digest == second.digest


def test_the_seeds_bring_every_kind_of_fault_and_of_end() -> None:
    kinds = {fault.kind for seed in SEEDS for fault in script(seed).faults}
    assert kinds == set(FaultKind)


def broken_by(seeds: range) -> set[str]:
    """The invariants that the runs find broken."""
    found = {words.partition(":")[0] for seed in seeds for words in play(script(seed)).broken}
    return {words for words in found if words.startswith("invariant")}


def test_a_permit_that_is_not_given_back_is_found() -> None:
    with mock.patch.object(Permit, "release", lambda *_: None):
        assert "invariant 3" in broken_by(range(2))


def test_a_sequence_that_is_not_aborted_is_found() -> None:
    with mock.patch.object(Execution, "release", lambda _: None):
        assert {"invariant 3", "invariant 5"} <= broken_by(range(6))


def test_a_token_that_comes_twice_is_found() -> None:
    push = Sequence.push

    def twice(self: Sequence, delta: Delta) -> None:
        push(self, Delta(delta.text * 2, delta.token_ids * 2, delta.finish_reason, delta.usage))

    with mock.patch.object(Sequence, "push", twice):
        assert "invariant 2" in broken_by(range(2))
