"""A worker or pair gets traffic after a probe went through, and not before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.execution import Execution
from coordinator.fleet import RECONNECT_S
from coordinator.policy.pairs import RETRY_S
from coordinator.proving import MAX_PROBES, MAX_PROBES_PER_WORKER, PROBE_TIMEOUT_S
from coordinator.record import RequestRecord
from pdserve.errors import DecodeError, ErrorReason, PrefillError, RejectedError
from pdserve.types import Delta, FinishReason, Load, Mode, Role, Usage
from tests.support.core import running
from tests.support.fake_script import Gate
from tests.support.fake_worker import FINGERPRINT, FakeWorker
from tests.support.proving import PROVEN, decode, prefill, verdicts
from tests.support.virtual_time import on_virtual_time, settle

BROKEN = DecodeError(ErrorReason.DECODE_FAILED, "it broke")


# The good case.


@on_virtual_time
async def test_decode_workers_answer_alone_before_pairs_are_tried() -> None:
    async with running(prefill(), decode("d1"), decode("d2")) as core:
        assert core.reports == [
            "d1 answers a prompt by itself",
            "d2 answers a prompt by itself",
            "p hands a prompt over to d1 by nixl",
            "p hands a prompt over to d2 by nixl",
        ]
        assert verdicts(core) == {("p", "d1"): PROVEN, ("p", "d2"): PROVEN}


@on_virtual_time
async def test_what_is_proven_is_not_probed_again() -> None:
    worker = decode()
    async with running(worker) as core:
        core.fleet.changed.set()
        await settle()
        assert core.rounds > 1
        assert len(worker.served) == 1


@on_virtual_time
async def test_a_probe_is_short_greedy_and_never_cached() -> None:
    worker, reader = decode(), prefill()
    async with running(reader, worker):
        pass
    requests = [*worker.requests, *reader.requests]
    assert {request.sampling.temperature for request in requests} == {0.0}
    assert {request.sampling.max_tokens for request in requests} == {4}
    assert len({request.cache_salt for request in worker.requests}) == 2


@on_virtual_time
async def test_a_worker_of_both_roles_hands_nothing_over_to_itself() -> None:
    both = [FakeWorker(name, Role.PREFILL, Role.DECODE) for name in ("w1", "w2")]
    async with running(*both) as core:
        assert verdicts(core) == {("w1", "w2"): PROVEN, ("w2", "w1"): PROVEN}


@on_virtual_time
async def test_probes_are_no_requests() -> None:
    async with running(prefill(), decode()) as core:
        assert core.access == []
        assert b"pdserve_requests_total{" not in core.ops.metrics()


# No traffic before.


@on_virtual_time
async def test_no_request_goes_to_a_worker_while_it_is_probed() -> None:
    worker, gate = decode(), Gate()
    worker.starts.append([gate])
    async with running(worker) as core:
        with pytest.raises(RejectedError) as refusal:
            await core.ask()
        assert refusal.value.reason is ErrorReason.NO_WORKER
        gate.open()
        await settle()
        await core.ask()


@on_virtual_time
async def test_no_request_goes_to_a_pair_while_it_is_probed() -> None:
    worker, gate = prefill(), Gate()
    worker.prefills.append([gate])
    async with running(worker, decode()) as core:
        answer = await core.ask(mode=Mode.DISAGGREGATED)
        assert answer.route.mode is Mode.COLOCATED
        gate.open()
        await settle()
        answer = await core.ask(mode=Mode.DISAGGREGATED)
        assert answer.route.mode is Mode.DISAGGREGATED


# Failed probes.


@on_virtual_time
async def test_a_failed_probe_is_told_and_tried_again() -> None:
    worker = decode()
    worker.starts.append([BROKEN])
    async with running(worker) as core:
        assert core.worker("d").detail == "probe failed: it broke"
        await asyncio.sleep(RETRY_S)
        await settle()
        assert core.worker("d").proven
        assert core.worker("d").detail == ""


@pytest.mark.parametrize("pair", [False, True])
@on_virtual_time
async def test_a_probe_that_goes_wrong_in_any_way_ends_no_proving(
    monkeypatch: pytest.MonkeyPatch, *, pair: bool
) -> None:
    begin = Execution.begin
    failures = [ValueError("a fault of our own"), KeyError("another")]

    async def broken(self: Execution, record: RequestRecord) -> Delta:
        if failures and pair is (self.plan.prefill is not None):
            raise failures.pop()
        return await begin(self, record)

    monkeypatch.setattr(Execution, "begin", broken)
    async with running(prefill(), decode()) as core:
        told = "probe failed: internal error"
        if pair:
            assert verdicts(core) == {("p", "d"): ("quarantined", told)}
        else:
            assert core.worker("d").detail == told
        # The second one fails, too; probes of pairs are tried ever more rarely.
        await asyncio.sleep(3 * RETRY_S)
        await settle()
        assert not failures
        assert core.worker("d").proven
        assert verdicts(core) == {("p", "d"): PROVEN}


@on_virtual_time
async def test_a_probe_without_an_answer_ends_in_time() -> None:
    worker = decode()
    worker.starts.append([Gate()])
    async with running(worker) as core:
        await asyncio.sleep(PROBE_TIMEOUT_S)
        await settle()
        assert core.worker("d").detail == "probe failed: no answer within 60 s"
        assert not worker.sequences


@pytest.mark.parametrize(
    ("scripts", "error"),
    [
        ("prefills", PrefillError(ErrorReason.PREFILL_FAILED, "it broke")),
        ("reservations", DecodeError(ErrorReason.DECODE_FAILED, "it broke")),
        ("starts", DecodeError(ErrorReason.KV_TRANSFER_FAILED, "it broke")),
    ],
)
@on_virtual_time
async def test_a_pair_whose_probe_failed_is_quarantined_and_tried_again(
    scripts: str, error: Exception
) -> None:
    reader, writer = prefill(), decode()
    if scripts == "starts":
        writer.starts.append([])  # its own answer goes through
    getattr(reader if scripts == "prefills" else writer, scripts).append([error])
    async with running(reader, writer) as core:
        assert verdicts(core) == {("p", "d"): ("quarantined", "probe failed: it broke")}
        assert core.ops.fleet()["pairs"][0]["detail"] == "probe failed: it broke"
        await asyncio.sleep(RETRY_S)
        await settle()
        assert verdicts(core) == {("p", "d"): PROVEN}


@pytest.mark.parametrize(
    ("scripts", "error"),
    [
        ("prefills", PrefillError(ErrorReason.NO_ROOM, "it is busy")),
        ("prefills", PrefillError(ErrorReason.DRAINING, "it is busy")),
        ("reservations", DecodeError(ErrorReason.NO_ROOM, "it is busy")),
    ],
)
@on_virtual_time
async def test_a_worker_too_busy_for_a_probe_is_asked_again_at_an_even_pace(
    scripts: str, error: Exception
) -> None:
    reader, writer = prefill(), decode()
    getattr(reader if scripts == "prefills" else writer, scripts).extend([[error]] * 5)
    async with running(reader, writer) as core:
        assert verdicts(core) == {("p", "d"): ("untried", "probe failed: it is busy")}
        assert core.ops.fleet()["pairs"][0]["next_probe_s"] == RETRY_S
        await asyncio.sleep(4.9 * RETRY_S)
        assert not core.fleet.snapshot("tiny").pairs
        await asyncio.sleep(0.2 * RETRY_S)
        assert verdicts(core) == {("p", "d"): PROVEN}
        assert core.ops.fleet()["pairs"][0]["next_probe_s"] is None


@on_virtual_time
async def test_the_transport_that_is_set_is_named_where_it_is_not_proven() -> None:
    reader = prefill(transports=BOTH)
    async with running(reader, decode(transports=BOTH), transport="grpc") as core:
        reader.restart()
        gate = Gate()
        reader.prefills.append([gate])
        await gate.reached.wait()
        given = await core.ask(mode=Mode.DISAGGREGATED)
        assert given.route.reason == (
            "disaggregated: asked for by the request; fell back to colocated: "
            "no pair of prefill and decode workers proven over grpc is ready"
        )
        gate.open()
        await settle()


@on_virtual_time
async def test_a_pair_that_writes_other_tokens_gets_no_traffic() -> None:
    worker = decode()
    wrong = Delta("wrong", [1], FinishReason.STOP, Usage(1, 1))
    worker.starts.extend([[], [wrong]])
    async with running(prefill(), worker) as core:
        cause = "the handed-over answer differs from the decode worker's own"
        assert verdicts(core) == {("p", "d"): ("quarantined", cause)}
        answer = await core.ask(mode=Mode.DISAGGREGATED)
        assert answer.route.mode is Mode.COLOCATED


# Weights of two precisions.

MIXTURE = "weights are fp8 on the prefill side and bfloat16 on the decode side"


@on_virtual_time
async def test_weights_that_differ_are_refused_by_name() -> None:
    reader = prefill(weights="fp8")
    async with running(reader, decode()) as core:
        refusal = f"{MIXTURE}, and mixed_precision is off"
        assert verdicts(core) == {("p", "d"): ("refused", refusal)}
        assert reader.served == []


@pytest.mark.parametrize("differs", [False, True])
@on_virtual_time
async def test_a_model_of_mixed_precision_is_proven_and_operators_see_it(*, differs: bool) -> None:
    worker = decode()
    other = Delta("close", [1], FinishReason.STOP, Usage(1, 1))
    worker.starts.extend([[], [other] if differs else []])
    async with running(prefill(weights="fp8"), worker, mixed_precision=True) as core:
        note = MIXTURE + "; answers differ, as mixed_precision allows" * differs
        assert verdicts(core) == {("p", "d"): ("proven", note)}
        assert core.ops.fleet()["pairs"][0]["detail"] == note
        assert [entry["note"] for entry in core.logs if entry["event"] == "pair proven"] == [note]
        assert (await core.ask(mode=Mode.DISAGGREGATED)).route.mode is Mode.DISAGGREGATED


@on_virtual_time
async def test_mixed_precision_excuses_no_pair_of_equal_weights() -> None:
    worker = decode()
    worker.starts.extend([[], [Delta("wrong", [1], FinishReason.STOP, Usage(1, 1))]])
    async with running(prefill(), worker, mixed_precision=True) as core:
        cause = "the handed-over answer differs from the decode worker's own"
        assert verdicts(core) == {("p", "d"): ("quarantined", cause)}


# Pairs that cannot be.


@on_virtual_time
async def test_different_pools_are_refused_for_good_without_a_probe() -> None:
    worker = prefill(fingerprint=replace(FINGERPRINT, block_size=16, kv_dtype="fp8"))
    async with running(worker, decode()) as core:
        await asyncio.sleep(2 * RETRY_S)
        refusal = (
            "kv_dtype is 'fp8' on the prefill side and 'bfloat16' on the decode side; "
            "block_size is 16 on the prefill side and 32 on the decode side"
        )
        assert verdicts(core) == {("p", "d"): ("refused", refusal)}
        assert worker.served == []


@on_virtual_time
async def test_workers_without_a_common_transport_are_no_pair() -> None:
    worker = prefill(transports=("nixl",))
    async with running(worker, decode(transports=("grpc",))) as core:
        refusal = "no KV transport in common: the prefill side has nixl, the decode side grpc"
        assert verdicts(core) == {("p", "d"): ("refused", refusal)}
        assert worker.served == []


@on_virtual_time
async def test_workers_of_different_models_are_no_pair() -> None:
    async with running(prefill(model="other"), decode()) as core:
        assert verdicts(core) == {}
        assert core.worker("p").detail == "serves 'other', which is not in coordinator.models"


# Workers that change meanwhile.


@on_virtual_time
async def test_a_draining_worker_is_not_probed() -> None:
    worker = decode()
    worker.report(Load(draining=True))
    async with running(worker):
        assert worker.served == []
        worker.report(Load())
        await settle()
        assert len(worker.served) == 1


@on_virtual_time
async def test_a_new_process_is_not_proven_by_the_old_one_s_hand_off() -> None:
    reader, writer, gate = prefill(), decode(), Gate()
    writer.starts.extend([[], [gate]])  # held after the prefill is done
    async with running(reader, writer) as core:
        await gate.reached.wait()
        reader.restart()
        second = Gate()
        reader.prefills.append([second])
        await asyncio.sleep(RECONNECT_S)
        gate.open()
        await second.reached.wait()
        assert not core.fleet.snapshot("tiny").pairs
        second.open()
        await settle()
        assert core.fleet.snapshot("tiny").pairs == {("p", "d"): ("nixl",)}


@on_virtual_time
async def test_a_process_is_not_proven_by_another_one_s_answer() -> None:
    worker, gate = decode(), Gate()
    async with running(worker) as core:
        core.encoder.gates.append(gate)
        worker.restart()
        await gate.reached.wait()
        worker.restart()
        await asyncio.sleep(2 * RECONNECT_S)
        gate.open()
        await settle()
        assert core.worker("d").proven
        assert len(worker.served) == 3


@on_virtual_time
async def test_a_worker_lost_in_its_probe_is_probed_when_it_is_back() -> None:
    worker, gate = decode(), Gate()
    worker.starts.append([gate])
    async with running(worker) as core:
        await gate.reached.wait()
        worker.restart()
        await asyncio.sleep(RECONNECT_S + RETRY_S)
        await settle()
        assert core.worker("d").proven


# Many at once.


@on_virtual_time
async def test_one_worker_that_hangs_does_not_hold_up_the_others() -> None:
    readers = [prefill(f"p{number}") for number in range(6)]
    writers = [decode(f"d{number}") for number in range(6)]
    readers[0].prefills.extend([[Gate()]] * 10)
    writers[0].starts.append([Gate()])
    async with running(*readers, *writers) as core:
        # Both hold their probes up for good, and all the others are done in no time.
        others = {(f"p{p}", f"d{d}") for p in range(1, 6) for d in range(1, 6)}
        assert core.fleet.snapshot("tiny").pairs.keys() == others
        assert readers[0].prefilling == MAX_PROBES_PER_WORKER
        await asyncio.sleep(10 * PROBE_TIMEOUT_S)
        assert len(core.fleet.snapshot("tiny").pairs) == 36


@on_virtual_time
async def test_probes_at_once_are_bounded() -> None:
    # One more on each side than would keep to the bound by themselves.
    workers = MAX_PROBES // MAX_PROBES_PER_WORKER + 1
    readers = [prefill(f"p{number}") for number in range(workers)]
    for reader in readers:
        reader.prefills.extend([[Gate()]] * MAX_PROBES_PER_WORKER)
    async with running(*readers, *(decode(f"d{number}") for number in range(workers))) as core:
        assert sum(reader.prefilling for reader in readers) == MAX_PROBES
        # The first time out, then the last of them; and each is probed again.
        await asyncio.sleep(3 * PROBE_TIMEOUT_S)
        assert len(core.fleet.snapshot("tiny").pairs) == workers**2


# By more than one transport.

BOTH = ("nixl", "grpc")


@on_virtual_time
async def test_each_transport_of_a_pair_is_proven() -> None:
    async with running(prefill(transports=BOTH), decode(transports=BOTH)) as core:
        assert core.fleet.snapshot("tiny").pairs == {("p", "d"): BOTH}


@on_virtual_time
async def test_a_transport_that_is_configured_is_the_only_one() -> None:
    workers = prefill(transports=BOTH), decode(transports=BOTH)
    async with running(*workers, transport="grpc") as core:
        assert core.fleet.snapshot("tiny").pairs == {("p", "d"): ("grpc",)}
        assert [pair["transport"] for pair in core.ops.fleet()["pairs"]] == ["grpc"]


@on_virtual_time
async def test_a_transport_that_fails_its_probes_leaves_the_pair_the_other() -> None:
    reader, writer = prefill(transports=BOTH), decode(transports=BOTH)
    writer.starts.extend([[], [DecodeError(ErrorReason.KV_TRANSFER_FAILED, "it broke")]])
    async with running(reader, writer) as core:
        # Both are probed at once, and over gRPC decoding starts earlier.
        assert core.fleet.snapshot("tiny").pairs == {("p", "d"): ("nixl",)}
        await asyncio.sleep(RETRY_S)
        await settle()
        assert core.fleet.snapshot("tiny").pairs == {("p", "d"): BOTH}
