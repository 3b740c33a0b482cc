"""Plans carried out where nothing breaks: what goes where, what is refused, what is counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest

from coordinator.defaults import Defaults
from coordinator.lifecycle import State
from pdserve.chat import ChatMessage
from pdserve.config import GatewayConfig, ModelConfig
from pdserve.config_experiment import Arm, Experiment
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError, RejectedError
from pdserve.types import (
    ChatPrompt,
    Load,
    Mode,
    Prompt,
    Role,
    TextPrompt,
    Truncation,
    Usage,
)
from tests.support.core import CONTEXT_LENGTH, GatedEncoder, assert_complete, running
from tests.support.fake_worker import (
    ANSWER_TOKENS,
    CACHED_AT_PREFILL,
    MODEL,
    FakeWorker,
    Gate,
    decodes,
    first_delta,
    pool,
    prefills,
)
from tests.support.virtual_time import on_virtual_time, settle

DISAGGREGATED = Mode.DISAGGREGATED


def prefill_error(reason: ErrorReason = ErrorReason.PREFILL_FAILED) -> PrefillError:
    return PrefillError(reason, "the reader broke")


def decode_error(reason: ErrorReason = ErrorReason.DECODE_FAILED) -> DecodeError:
    return DecodeError(reason, "the writer broke")


# Nothing goes wrong.


@on_virtual_time
async def test_a_colocated_request_goes_to_the_decode_worker_alone() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask()
        assert_complete(given)
        assert given.route.mode is Mode.COLOCATED
        assert core.verbs == ["colocated"]
        assert core.record.state is State.FINISHED


@on_virtual_time
async def test_a_disaggregated_request_is_read_by_one_and_written_by_the_other() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.mode is DISAGGREGATED
        assert core.verbs == ["decode", "prefill"]
        assert (core.record.prefill_worker, core.record.decode_worker) == ("p1", "d1")


@on_virtual_time
async def test_room_is_reserved_for_prompt_and_answer() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer) as core:
        await core.ask("12345", max_tokens=8, mode=DISAGGREGATED)
        assert writer.reserved[-1] == 13


@on_virtual_time
async def test_no_prompt_is_read_before_there_is_room() -> None:
    (reader,), (writer,), gate = prefills(), decodes(), Gate()
    async with running(reader, writer) as core:
        writer.reservations.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        assert core.verbs == []
        gate.open()
        assert_complete(await asking)


@on_virtual_time
async def test_a_prompt_counts_where_it_will_be_read_before_there_is_room() -> None:
    """Else all that come at once would be planned for the same reader."""
    (writer,), gate = decodes(), Gate()
    async with running(*prefills(), writer) as core:
        writer.reservations.append([gate])
        asking = asyncio.create_task(core.ask("12345", mode=DISAGGREGATED))
        await gate.reached.wait()
        (reader,) = core.fleet.snapshot(MODEL).prefill
        assert (reader.outstanding_prompts, reader.outstanding_tokens) == (1, 5)
        gate.open()
        await asking
        (reader,) = core.fleet.snapshot(MODEL).prefill
        assert (reader.outstanding_prompts, reader.outstanding_tokens) == (0, 0)


@on_virtual_time
async def test_the_lease_ends_with_the_first_token() -> None:
    (reader,), (writer,), gate = prefills(), decodes(), Gate()
    async with running(reader, writer) as core:
        writer.starts.append([gate])
        opening = asyncio.create_task(core.open(mode=DISAGGREGATED))
        await gate.reached.wait()
        assert len(reader.leases) == 1
        gate.open()
        stream = await opening
        await settle()
        assert not reader.leases
        await stream.aclose()


@on_virtual_time
async def test_the_cached_tokens_of_a_hand_off_are_the_prefill_worker_s() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask("12345", mode=DISAGGREGATED)
        assert given.usage == Usage(5, ANSWER_TOKENS, CACHED_AT_PREFILL)
        assert core.record.usage == given.usage


@on_virtual_time
async def test_the_cached_tokens_after_a_fall_back_are_the_decode_worker_s() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer) as core:
        writer.starts.append([decode_error(ErrorReason.KV_EXPIRED)])
        given = await core.ask("12345", mode=DISAGGREGATED)
        assert given.usage == Usage(5, ANSWER_TOKENS, 0)


# Over gRPC the blocks travel while others are read.


OVER_GRPC: dict[str, Any] = {"transports": ("grpc",)}


@on_virtual_time
async def test_over_grpc_the_sequence_starts_while_its_prompt_is_read() -> None:
    (reader,), writers, gate = prefills(**OVER_GRPC), decodes(**OVER_GRPC), Gate()
    async with running(reader, *writers) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask("12345", mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert core.verbs == ["decode", "prefill"]
        assert not asking.done()
        gate.open()
        given = await asking
        assert_complete(given, "12345")
        assert given.usage == Usage(5, ANSWER_TOKENS, CACHED_AT_PREFILL)
        assert core.verbs == ["decode", "prefill"]


@on_virtual_time
async def test_over_nixl_the_sequence_starts_when_its_prompt_is_read() -> None:
    (reader,), gate = prefills(), Gate()
    async with running(reader, *decodes()) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert core.verbs == ["prefill"]
        gate.open()
        assert_complete(await asking)


@on_virtual_time
async def test_a_sequence_whose_prompt_cannot_be_read_is_aborted() -> None:
    (reader,), (writer,), gate = prefills(**OVER_GRPC), decodes(**OVER_GRPC), Gate()
    async with running(reader, writer) as core:
        reader.prefills.append([gate, prefill_error()])
        writer.starts.append([Gate()])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert len(writer.sequences) == 1
        gate.open()
        given = await asking
        assert_complete(given)
        assert given.route.reason.endswith("fell back to colocated: the reader broke")
        assert core.record.fallbacks == ["colocated: prefill_failed"]


@pytest.mark.parametrize(
    ("prefill", "cause"),
    [
        ([0.2, prefill_error()], "prefill_failed"),
        ([prefill_error()], "prefill_failed"),
        ([3600.0], "kv_transfer_failed"),
        ([0.2], "kv_transfer_failed"),
    ],
)
@on_virtual_time
async def test_the_prefill_worker_knows_best_why_its_blocks_do_not_come(
    prefill: list[Any], cause: str
) -> None:
    (reader,), (writer,) = prefills(**OVER_GRPC), decodes(**OVER_GRPC)
    async with running(reader, writer) as core:
        reader.prefills.append(prefill)
        writer.starts.append([decode_error(ErrorReason.KV_TRANSFER_FAILED)])
        began = time.monotonic()
        assert_complete(await core.ask(mode=DISAGGREGATED))
        assert core.record.fallbacks == [f"colocated: {cause}"]
        assert time.monotonic() - began < 1


@on_virtual_time
async def test_a_decode_worker_that_refuses_at_once_stops_the_prefill() -> None:
    (reader,), (writer,) = prefills(**OVER_GRPC), decodes(**OVER_GRPC)
    async with running(reader, writer) as core:
        reader.prefills.append([3600.0])
        writer.starts.append([decode_error(ErrorReason.KV_ALTERED)])
        began = time.monotonic()
        assert_complete(await core.ask(mode=DISAGGREGATED))
        assert core.record.fallbacks == ["colocated: kv_altered"]
        assert time.monotonic() - began < 0.1


@on_virtual_time
async def test_closing_again_changes_nothing() -> None:
    async with running(*decodes()) as core:
        stream = await core.open()
        for _ in range(2):
            await stream.aclose()
        assert core.record.state is State.CANCELLED


@on_virtual_time
async def test_a_closed_answer_has_nothing_more_to_read() -> None:
    async with running(*decodes()) as core:
        stream = await core.open()
        await stream.aclose()
        assert [delta async for delta in stream] == []


# Refused before a worker is touched.


@on_virtual_time
async def test_an_unknown_model_is_not_found() -> None:
    async with running(*decodes()) as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open(model="unheard-of")
        assert refusal.value.reason is ErrorReason.MODEL_NOT_FOUND
        assert refusal.value.param == "model"
        assert core.record.model == ""


@on_virtual_time
async def test_without_a_worker_there_is_no_answer() -> None:
    async with running() as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open()
        assert refusal.value.reason is ErrorReason.NO_WORKER


@on_virtual_time
async def test_a_full_queue_refuses_at_once() -> None:
    gateway = GatewayConfig(max_running=1, max_queued=0)
    async with running(*decodes(), gateway=gateway) as core:
        first = await core.open()
        with pytest.raises(RejectedError) as refusal:
            await core.open()
        assert refusal.value.reason is ErrorReason.QUEUE_FULL
        await first.aclose()
        await core.ask()


@on_virtual_time
async def test_a_used_up_rate_refuses() -> None:
    async with running(*decodes(), gateway=GatewayConfig(rate="1/hour")) as core:
        await core.ask()
        with pytest.raises(RejectedError) as refusal:
            await core.ask()
        assert refusal.value.reason is ErrorReason.RATE_LIMITED
        assert core.verbs == []


@on_virtual_time
async def test_models_queue_apart() -> None:
    models = (ModelConfig(name=MODEL), ModelConfig(name="other"))
    workers = *decodes(), FakeWorker("o", Role.DECODE, model="other")
    gateway = GatewayConfig(max_running=1, max_queued=0)
    async with running(*workers, models=models, gateway=gateway) as core:
        first = await core.open()
        await core.ask(model="other")
        await first.aclose()


# What fits.


@on_virtual_time
async def test_max_tokens_defaults_to_what_is_left_of_the_context() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        await core.ask("12345", max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == CONTEXT_LENGTH - 5


@on_virtual_time
async def test_a_model_may_have_a_longest_answer_for_those_who_name_none() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        model = core.models[MODEL]
        core.models[MODEL] = replace(model, defaults=Defaults(max_tokens=20))
        for asked, got in ((None, 20), (30, 30)):
            await core.ask("12345", max_tokens=asked)
            assert writer.requests[-1].sampling.max_tokens == got
        await core.ask("x" * (CONTEXT_LENGTH - 4), max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == 4


@on_virtual_time
async def test_the_worker_s_context_counts_where_it_is_shorter() -> None:
    (writer,) = pool(1, Role.DECODE, name="d", context_length=600)
    async with running(writer) as core:
        await core.ask("12345", max_tokens=None)
        assert writer.requests[-1].sampling.max_tokens == 595


@on_virtual_time
async def test_prompt_and_answer_may_fill_the_context() -> None:
    async with running(*decodes()) as core:
        await core.ask("12345", max_tokens=CONTEXT_LENGTH - 5)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        (TextPrompt("12345"), CONTEXT_LENGTH - 4, "max_tokens"),
        (TextPrompt("x" * CONTEXT_LENGTH), None, "prompt"),
        (ChatPrompt((ChatMessage("user", "x" * CONTEXT_LENGTH),)), None, "messages"),
    ],
)
@on_virtual_time
async def test_what_cannot_fit_is_refused_with_the_field_at_fault(
    prompt: Prompt, max_tokens: int | None, param: str
) -> None:
    async with running(*decodes()) as core:
        with pytest.raises(RejectedError) as refusal:
            await core.open(max_tokens=max_tokens, prompt=prompt)
        assert refusal.value.reason is ErrorReason.CONTEXT_LENGTH_EXCEEDED
        assert refusal.value.param == param
        assert str(CONTEXT_LENGTH) in refusal.value.message
        assert core.verbs == []


@on_virtual_time
async def test_an_answer_needs_at_least_one_token_of_room() -> None:
    async with running(*decodes()) as core:
        await core.ask("x" * (CONTEXT_LENGTH - 1), max_tokens=None)


@pytest.mark.parametrize(
    ("tokens", "kept", "answer"),
    [(4, 4, 50), (-1, CONTEXT_LENGTH - 1, 1), (CONTEXT_LENGTH - 10, CONTEXT_LENGTH - 10, 10)],
)
@on_virtual_time
async def test_a_prompt_is_cut_and_its_answer_gets_the_room_that_is_left(
    tokens: int, kept: int, answer: int
) -> None:
    (writer,) = decodes()
    prompt = TextPrompt("0" * CONTEXT_LENGTH + "1234")
    async with running(writer) as core:
        await core.ask(prompt=prompt, max_tokens=50, truncation=Truncation(tokens))
        request = writer.requests[-1]
        assert len(request.token_ids) == kept
        assert request.token_ids[-4:] == tuple(ord(digit) + 3 for digit in "1234")
        assert request.sampling.max_tokens == answer


# Experiments and the automatic mode.


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


# Times.


@on_virtual_time
async def test_the_phases_of_a_hand_off_add_up_to_the_time_of_its_first_token() -> None:
    (reader,), (writer,) = prefills(), decodes()
    async with running(reader, writer) as core:
        writer.reservations.append([1.0])
        reader.prefills.append([2.0])
        writer.starts.append([4.0])
        await core.ask(mode=DISAGGREGATED)
        record = core.record
        assert record.phases == pytest.approx(
            {
                "queue": 0,
                "tokenise": 0,
                "reserve": 1,
                "prefill_queue": 1.75,
                "prefill": 0.25,
                "decode_queue": 3.375,
                "transfer": 0.5,
                "first_step": 0.125,
                "decode": 0,
            }
        )
        assert record.first_token is not None
        assert sum(record.phases.values()) == pytest.approx(record.first_token - record.received)


@on_virtual_time
async def test_the_time_of_failed_attempts_is_a_phase_of_its_own() -> None:
    (reader,), (writer,) = prefills(), decodes()
    async with running(reader, writer) as core:
        reader.prefills.append([3.0, prefill_error()])
        writer.starts.append([1.0])
        await core.ask(mode=DISAGGREGATED)
        record = core.record
        assert record.phases["failed_attempts"] == pytest.approx(3)
        assert record.phases["decode_queue"] == pytest.approx(0.875)
        assert record.first_token is not None
        assert sum(record.phases.values()) == pytest.approx(record.first_token - record.received)


@on_virtual_time
async def test_the_wait_for_a_place_is_a_phase() -> None:
    async with running(*decodes(), gateway=GatewayConfig(max_running=1)) as core:
        first = await core.open()
        asking = asyncio.create_task(core.ask())
        await asyncio.sleep(5)
        await first.aclose()
        await asking
        assert core.record.phases["queue"] == pytest.approx(5)


# Faults of our own.


class BrokenEncoder(GatedEncoder):
    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        raise RuntimeError("a fault")


@on_virtual_time
async def test_a_fault_of_our_own_is_counted_and_gives_everything_back() -> None:
    async with running(*decodes()) as core:
        object.__setattr__(core.models[MODEL], "encoder", BrokenEncoder())
        with pytest.raises(RuntimeError):
            await core.open()
        assert core.access[-1]["outcome"] == "internal"
        assert core.record.state is State.FAILED


@on_virtual_time
async def test_a_text_that_cannot_be_encoded_is_refused() -> None:
    async with running(*decodes()) as core:
        with pytest.raises(PdserveError) as refusal:
            await core.open("\ud800")
        assert refusal.value.reason is ErrorReason.INVALID_ARGUMENT


@on_virtual_time
async def test_draining_workers_keep_what_they_have() -> None:
    (writer,), gate = decodes(), Gate()
    async with running(writer) as core:
        writer.starts.append([first_delta(""), gate])
        asking = asyncio.create_task(core.ask())
        await gate.reached.wait()
        writer.report(Load(draining=True))
        await settle()
        gate.open()
        assert_complete(await asking)
