"""Routes by experiment and by the automatic mode."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pdserve.config_experiment import Arm, Experiment
from pdserve.types import Mode
from tests.support.core import running
from tests.support.fake_script import prefill_error
from tests.support.fake_worker import MODEL, decodes, prefills
from tests.support.virtual_time import on_virtual_time

DISAGGREGATED = Mode.DISAGGREGATED


def split(key: Literal["request", "session", "tenant"]) -> Experiment:
    arms = (Arm(name="a", mode=Mode.COLOCATED), Arm(name="b", mode=DISAGGREGATED))
    return Experiment(name="split", model=MODEL, key=key, arms=arms)


@on_virtual_time
async def test_an_experiment_is_sticky_by_its_key() -> None:
    async with running(*prefills(), *decodes(), experiments=(split("session"),)) as core:
        arms = {
            session: {(await core.ask(session=session)).route.arm for _ in range(3)}
            for session in "abcdefgh"
        }
        assert all(len(met) == 1 for met in arms.values())
        assert set.union(*arms.values()) == {"a", "b"}


@on_virtual_time
async def test_a_request_without_a_session_meets_an_arm_by_itself() -> None:
    async with running(*prefills(), *decodes(), experiments=(split("session"),)) as core:
        met = Counter([(await core.ask()).route.arm for _ in range(20)])
        assert set(met) == {"a", "b"}


@on_virtual_time
async def test_a_request_stays_in_its_arm_when_it_falls_back() -> None:
    (reader,) = prefills()
    async with running(reader, *decodes(), experiments=(split("session"),)) as core:
        arms = {session: (await core.ask(session=session)).route.arm for session in "abcdefgh"}
        session = next(session for session, arm in arms.items() if arm == "b")
        reader.prefills.append([prefill_error()])
        given = await core.ask(session=session)
        assert (given.route.mode, given.route.arm) == (Mode.COLOCATED, "b")


@on_virtual_time
async def test_auto_does_not_count_what_the_decode_worker_has_cached() -> None:
    text = "x" * 600
    async with running(*prefills(), *decodes(), mode=Mode.AUTO, decider="threshold") as core:
        routes = [(await core.ask(text)).route.mode for _ in range(2)]
        assert routes == [DISAGGREGATED, Mode.COLOCATED]
