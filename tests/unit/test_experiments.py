"""Experiments on a coordinator's core: what counts, what is stopped, what is thrown away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from coordinator.record import RequestRecord
from pdserve.ab.report import compare
from pdserve.ab.slots import experiment
from pdserve.config_experiment import Experiment
from pdserve.errors import DecodeError, ErrorReason, PrefillError, RejectedError
from pdserve.types import GenerateSpec, Mode, Role, SamplingParams, TextPrompt
from tests.support.core import CALLER, Core, running
from tests.support.fake_script import Gate
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.virtual_time import on_virtual_time, settle

ARMS = [{"name": "a", "mode": "colocated"}, {"name": "b", "mode": "disaggregated"}]
BROKEN = DecodeError(ErrorReason.INTERNAL, "broken")
UNREAD = PrefillError(ErrorReason.INTERNAL, "broken")


def workers() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE)


def asked(**fields: Any) -> dict[str, Any]:
    return {"name": "split", "arms": ARMS, "slot_s": 10, "washout_s": 2, **fields}


def slots(core: Core) -> list[dict[str, Any]]:
    return core.ops.experiment(MODEL)["slots"]


@on_virtual_time
async def test_one_that_is_started_takes_effect_at_once_and_ends_when_it_is_stopped() -> None:
    async with running(*workers(), mode_override=False) as core:
        assert not core.models[MODEL].may_disaggregate
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        assert core.models[MODEL].may_disaggregate
        met = set()
        for _ in range(2):
            met.add((await core.ask()).route.arm)
            await asyncio.sleep(10)
        assert met == {"a", "b"}
        assert not core.ops.stop_experiment(MODEL)["running"]
        assert (await core.ask()).route.arm == ""
        assert not core.models[MODEL].may_disaggregate


@on_virtual_time
async def test_both_slots_of_a_block_are_told_when_they_are_over() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        await core.ask()  # in the washout
        await asyncio.sleep(5)
        for _ in range(3):
            await core.ask()
        assert slots(core) == []
        await asyncio.sleep(10)
        await core.ask()
        await asyncio.sleep(10)
        told = slots(core)
        assert [(slot["block"], slot["asked"], slot["good"]) for slot in told] == [
            (0, 3, 3),
            (0, 1, 1),
        ]
        assert {slot["arm"] for slot in told} == {"a", "b"}
        assert all(slot["seconds"] == 8 for slot in told)
        usage = (await core.ask()).usage
        assert usage is not None
        assert told[0]["good_tokens"] == 3 * (usage.prompt_tokens + usage.completion_tokens)
        assert all(len(slot["ttft_s"]) == 3 for slot in told)


@on_virtual_time
async def test_a_slot_waits_for_its_last_answer() -> None:
    prefill, decode = workers()
    async with running(prefill, decode) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        await asyncio.sleep(5)
        stream = await core.open()
        await asyncio.sleep(10)
        assert slots(core) == []
        async for _ in stream:
            pass
        await stream.aclose()
        assert [slot["asked"] for slot in slots(core)] == [1]


@on_virtual_time
async def test_late_and_failed_is_not_good_and_what_was_the_clients_does_not_count() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, ttft_target_s=1.0, max_recoveries=0) as core:
        core.ops.start_experiment(MODEL, asked(arms=[ARMS[0], {**ARMS[0], "name": "b"}]))
        await asyncio.sleep(3)
        await core.ask()
        gate = Gate()
        decode.starts.append([gate])
        late = asyncio.create_task(core.ask())
        await asyncio.sleep(2)
        gate.open()
        await late
        decode.starts.append([BROKEN])
        with suppress(DecodeError):
            await core.ask()
        with pytest.raises(RejectedError):
            await core.ask("x" * 5000)  # longer than the context
        left = await core.open()
        await left.aclose()
        await core.ask(mode=Mode.COLOCATED)  # its own wish
        await core.ask(sampling=SamplingParams(max_tokens=2, prompt_logprobs=1))
        await asyncio.sleep(10)
        told = slots(core)
        assert sum(slot["asked"] for slot in told) == 3
        assert sum(slot["good"] for slot in told) == 1


@on_virtual_time
async def test_times_between_tokens_are_told_by_arm_and_still_in_the_metrics() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        await asyncio.sleep(5)
        await core.ask(max_tokens=4)
        gaps = core.registry.get_sample_value
        counted = [
            gaps("pdserve_inter_token_latency_seconds_count", {"model": MODEL, "mode": mode}) or 0
            for mode in ("colocated", "disaggregated")
        ]
        assert sum(counted) == len((await core.ask(max_tokens=4)).deltas) - 1
        await asyncio.sleep(10)
        [slot] = slots(core)
        assert slot["itl_s"] is not None


@on_virtual_time
async def test_an_arm_that_breaks_its_targets_alone_is_stopped() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, fallback="fail") as core:
        core.ops.start_experiment(MODEL, asked(slot_s=1000))
        await asyncio.sleep(5)
        refusals = 0
        prefill.prefills.extend([[UNREAD]] * 1000)
        for _ in range(400):
            try:
                await core.ask()
            except (PrefillError, RejectedError):
                refusals += 1
        assert 100 <= refusals < 150  # of both arms so many are looked at
        first, second = core.ops.experiment(MODEL)["arms"]
        assert first["stopped"] == ""
        assert second["stopped"] == "b met its targets in 0 of its last 100 requests"
        stopped = core.registry.get_sample_value(
            "pdserve_experiment_arms_stopped_total", {"model": MODEL, "arm": "b"}
        )
        assert stopped == 1
        assert [entry["arm"] for entry in core.logs if entry["event"] == "arm stopped"] == ["b"]
        assert (await core.ask()).route.arm == "a"


@on_virtual_time
async def test_where_all_arms_break_their_targets_it_is_the_load_and_none_is_stopped() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, max_recoveries=0) as core:
        core.ops.start_experiment(MODEL, asked(arms=[ARMS[0], {**ARMS[0], "name": "b"}]))
        await asyncio.sleep(3)
        decode.starts.extend([[BROKEN]] * 400)
        for _ in range(400):
            with suppress(DecodeError, RejectedError):
                await core.ask()
        assert all(arm["stopped"] == "" for arm in core.ops.experiment(MODEL)["arms"])


@on_virtual_time
async def test_few_requests_of_another_arm_stop_none() -> None:
    """Ninety-nine that went well say little of what all traffic would be."""
    prefill, decode = workers()
    async with running(prefill, decode, fallback="fail") as core:
        heavy = [{**ARMS[1], "weight": 9}, {**ARMS[0], "weight": 1}]
        core.ops.start_experiment(MODEL, asked(slot_s=1000, arms=heavy))
        await asyncio.sleep(5)
        prefill.prefills.extend([[UNREAD]] * 1000)
        for _ in range(500):
            with suppress(PrefillError, RejectedError):
                await core.ask()
        assert all(arm["stopped"] == "" for arm in core.ops.experiment(MODEL)["arms"])


@on_virtual_time
async def test_the_arm_that_serves_all_beside_a_shadow_is_never_called_stopped() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, fallback="fail") as core:
        turned = [ARMS[1], ARMS[0]]
        core.ops.start_experiment(MODEL, asked(slot_s=1000, arms=turned, assignment="shadow"))
        await asyncio.sleep(5)
        prefill.prefills.extend([[UNREAD]] * 1000)
        for _ in range(200):
            with suppress(PrefillError, RejectedError):
                await core.ask()
            await settle()
        assert all(arm["stopped"] == "" for arm in core.ops.experiment(MODEL)["arms"])
        core.logs[:] = [entry for entry in core.logs if entry.get("surface") != "shadow"]


async def arrive(core: Core, ago_s: float, **fields: Any) -> None:
    """A request whose first byte came some time ago; `fields` are those of its record."""
    name = f"late-{len(core.records)}"
    record = RequestRecord(
        name, "http", "completion", False, "trace", time.monotonic() - ago_s, **fields
    )
    core.records.append(record)
    spec = GenerateSpec(name, MODEL, TextPrompt("hello"), SamplingParams(max_tokens=8))
    stream = await core.dispatcher.open(spec, CALLER, record)
    async for _ in stream:
        pass
    await stream.aclose()


@on_virtual_time
async def test_what_was_long_in_coming_changes_no_slot_that_is_told() -> None:
    """A body may take as long as its sender likes."""
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        await asyncio.sleep(5)
        for _ in range(3):
            await core.ask()
        await asyncio.sleep(8)
        told = slots(core)
        assert [slot["asked"] for slot in told] == [3]
        await arrive(core, ago_s=8)  # when that slot was
        await arrive(core, ago_s=30)  # before there was an experiment
        await asyncio.sleep(10)
        assert slots(core)[:1] == told
        assert [(slot["block"], slot["asked"]) for slot in slots(core)[1:]] == [(0, 2)]


@on_virtual_time
async def test_a_prompt_of_several_choices_is_one_prompt() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved"))
        await asyncio.sleep(5)
        await arrive(core, 0)
        await arrive(core, 0, counts_prompt=False)
        await asyncio.sleep(8)
        used = core.records[-1].usage
        assert used is not None
        [slot] = slots(core)
        assert slot["good_tokens"] == used.prompt_tokens + 2 * used.completion_tokens


@on_virtual_time
async def test_a_shadow_is_served_a_copy_that_nobody_reads() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="shadow"))
        await asyncio.sleep(5)
        given = await core.ask()
        assert (given.route.arm, given.route.mode) == ("a", Mode.COLOCATED)
        await settle()
        copies = [entry for entry in core.access if entry["surface"] == "shadow"]
        assert [(copy["arm"], copy["mode"], copy["outcome"]) for copy in copies] == [
            ("b", "disaggregated", "ok")
        ]
        assert not core.timelines.find(copies[0]["request_id"])  # who charges hears of none
        await asyncio.sleep(10)
        assert Counter(slot["arm"] for slot in slots(core)) == {"a": 1, "b": 1}
        core.logs[:] = [entry for entry in core.logs if entry.get("surface") != "shadow"]


@on_virtual_time
async def test_what_becomes_of_a_copy_is_no_step_that_a_client_took() -> None:
    reader, writer = workers()
    async with running(reader, writer) as core:
        core.ops.start_experiment(MODEL, asked(assignment="shadow"))
        reader.prefills.append([PrefillError(ErrorReason.PREFILL_FAILED, "the reader broke")])
        await core.ask()
        await settle()
        (copy,) = [entry for entry in core.access if entry["surface"] == "shadow"]
        assert copy["fallbacks"] == ["colocated: prefill_failed"]
        names = {sample.name for family in core.registry.collect() for sample in family.samples}
        assert "pdserve_requests_total" in names
        assert "pdserve_fallbacks_total" not in names
        core.logs[:] = [entry for entry in core.logs if entry.get("surface") != "shadow"]


@on_virtual_time
async def test_an_arm_may_be_asked_for_and_then_counts_for_nothing() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked(assignment="shadow"))
        await asyncio.sleep(5)
        for arm, mode in (("a", Mode.COLOCATED), ("b", Mode.DISAGGREGATED)):
            given = await core.ask(arm=arm)
            assert (given.route.arm, given.route.mode) == (arm, mode)
        await settle()
        assert not [entry for entry in core.access if entry["surface"] == "shadow"]
        await asyncio.sleep(10)
        assert slots(core) == []


@on_virtual_time
async def test_an_arm_that_does_not_run_is_refused() -> None:
    async with running(*workers()) as core:
        with pytest.raises(RejectedError, match="arm 'a'"):
            await core.ask(arm="a")
        core.ops.start_experiment(MODEL, asked())
        with pytest.raises(RejectedError, match="arm 'c'"):
            await core.ask(arm="c")
        core.ops.stop_experiment(MODEL)
        with pytest.raises(RejectedError, match="arm 'b'"):
            await core.ask(arm="b")


@on_virtual_time
async def test_copies_are_capped_and_harm_nobody_when_they_fail() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, fallback="fail") as core:
        core.ops.start_experiment(MODEL, asked(assignment="shadow", copies=1))
        gate = Gate()
        prefill.prefills.append([gate, UNREAD])
        for _ in range(3):
            assert (await core.ask()).route.arm == "a"
        gate.open()
        await settle()
        await core.ask()
        await settle()
        copies = [entry for entry in core.access if entry["surface"] == "shadow"]
        assert [copy["outcome"] for copy in copies] == ["internal", "ok"]
        core.logs[:] = [entry for entry in core.logs if entry.get("surface") != "shadow"]


@on_virtual_time
async def test_arms_are_told_with_what_they_can_use() -> None:
    """The prefill worker is none of the colocated arm's."""
    async with running(*workers()) as core:
        told = core.ops.start_experiment(MODEL, asked())
        assert [(arm["name"], arm["gpus"]) for arm in told["arms"]] == [("a", 1), ("b", 2)]
        assert core.ops.experiments() == [{k: v for k, v in told.items() if k != "slots"}]


@on_virtual_time
async def test_arms_are_told_with_what_their_gpus_cost_and_keep_it_when_workers_leave() -> None:
    prefill, decode = workers()
    async with running(prefill, decode, prices={"prefill": 2.0, "decode": 3.0}) as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved", washout_s=0))
        for _ in range(4):
            await core.ask()
            await asyncio.sleep(10)
        for worker in core.fleet.workers():
            worker.connected = False
        arms = core.ops.experiment(MODEL)["arms"]
        assert [(arm["gpus"], arm["hour"]) for arm in arms] == [(1, 3.0), (2, 5.0)]


@on_virtual_time
async def test_an_experiment_without_a_worker_has_a_report() -> None:
    async with running() as core:
        core.ops.start_experiment(MODEL, asked(assignment="interleaved", washout_s=0))
        for _ in range(4):
            with suppress(RejectedError):
                await core.ask()
            await asyncio.sleep(10)
        [found] = compare(experiment(core.ops.experiment(MODEL)), None)
        assert (found.blocks, found.requests) == (2, 4)
        assert found.verdict == "not yet known, and no difference in sight"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"arms": ARMS[:1]}, "arms"),
        ({"arms": [ARMS[0], {**ARMS[1], "name": "a"}]}, None),
        ({"washout_s": 10}, None),
        ({"assignment": "shadow", "arms": [*ARMS, {**ARMS[0], "name": "c"}]}, None),
        ({"assignment": "interleaved", "arms": [ARMS[0], {**ARMS[1], "weight": 2}]}, None),
        ({"arms": [ARMS[0], {**ARMS[1], "decode_balance": "by-magic"}]}, None),
        ({"guard": 2}, "guard"),
        ({"unknown": 1}, "unknown"),
        ({"name": "two\nlines"}, "name"),
        ({"arms": [ARMS[0], {**ARMS[1], "name": "nul\0"}]}, "arms.1.name"),
    ],
)
@on_virtual_time
async def test_nonsense_is_refused(fields: dict[str, Any], param: str | None) -> None:
    async with running(*workers()) as core:
        with pytest.raises(RejectedError) as refused:
            core.ops.start_experiment(MODEL, asked(**fields))
        assert "Value error" not in refused.value.message
        assert param is None or refused.value.message.startswith(f"{param}: ")
        assert (refused.value.reason, refused.value.param) == (ErrorReason.INVALID_ARGUMENT, param)
        with pytest.raises(RejectedError, match="has had no experiment"):
            core.ops.experiment(MODEL)
        with pytest.raises(RejectedError, match="is running"):
            core.ops.stop_experiment(MODEL)


@on_virtual_time
async def test_a_model_has_one_experiment_at_a_time() -> None:
    async with running(*workers()) as core:
        core.ops.start_experiment(MODEL, asked())
        with pytest.raises(RejectedError, match="split of"):
            core.ops.start_experiment(MODEL, asked(name="other"))
        with pytest.raises(RejectedError, match="no model 'other'"):
            core.ops.start_experiment("other", asked())
        core.ops.stop_experiment(MODEL)
        assert core.ops.start_experiment(MODEL, asked(name="other"))["name"] == "other"


def test_fields_have_the_defaults_that_the_documents_tell() -> None:
    experiment = Experiment.model_validate({"name": "e", "model": "m", "arms": ARMS})
    assert (experiment.slot_s, experiment.washout_s, experiment.guard) == (60, 10, 0.5)
