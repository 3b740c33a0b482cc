"""A worker or pair gets traffic after a probe went through, and not before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from coordinator.fleet import RECONNECT_S
from coordinator.proving import PROBE_TIMEOUT_S, RETRY_S, differences
from pdserve.errors import DecodeError, ErrorReason, PrefillError, RejectedError
from pdserve.types import Delta, FinishReason, Load, Mode, Role, Usage
from tests.support.core import Core, running
from tests.support.fake_worker import FINGERPRINT, FakeWorker, Gate
from tests.support.virtual_time import on_virtual_time, settle

BROKEN = DecodeError(ErrorReason.DECODE_FAILED, "it broke")


def prefill(worker_id: str = "p", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.PREFILL, **info)


def decode(worker_id: str = "d", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.DECODE, **info)


def verdicts(core: Core) -> dict[tuple[str, str], str]:
    return {(pair.prefill[0], pair.decode[0]): why for pair, why in core.fleet.pairs.items()}


# The good case.


@on_virtual_time
async def test_decode_workers_answer_alone_before_pairs_are_tried() -> None:
    async with running(prefill(), decode("d1"), decode("d2")) as core:
        assert core.reports == [
            "d1 answers a prompt by itself",
            "d2 answers a prompt by itself",
            "p hands a prompt over to d1",
            "p hands a prompt over to d2",
        ]
        assert verdicts(core) == {("p", "d1"): "", ("p", "d2"): ""}


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
        assert verdicts(core) == {("w1", "w2"): "", ("w2", "w1"): ""}


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
        ("reservations", DecodeError(ErrorReason.NO_ROOM, "it broke")),
        ("starts", DecodeError(ErrorReason.KV_TRANSFER_FAILED, "it broke")),
    ],
)
@on_virtual_time
async def test_a_pair_whose_probe_failed_is_refused_and_tried_again(
    scripts: str, error: Exception
) -> None:
    reader, writer = prefill(), decode()
    if scripts == "starts":
        writer.starts.append([])  # its own answer goes through
    getattr(reader if scripts == "prefills" else writer, scripts).append([error])
    async with running(reader, writer) as core:
        assert verdicts(core) == {("p", "d"): "probe failed: it broke"}
        assert core.ops.fleet()["pairs"][0]["detail"] == "probe failed: it broke"
        await asyncio.sleep(RETRY_S)
        await settle()
        assert verdicts(core) == {("p", "d"): ""}


@on_virtual_time
async def test_a_pair_that_writes_other_tokens_is_refused() -> None:
    worker = decode()
    wrong = Delta("wrong", [1], FinishReason.STOP, Usage(1, 1))
    worker.starts.extend([[], [wrong]])
    async with running(prefill(), worker) as core:
        refusal = "the handed-over answer differs from the decode worker's own"
        assert verdicts(core) == {("p", "d"): refusal}
        answer = await core.ask(mode=Mode.DISAGGREGATED)
        assert answer.route.mode is Mode.COLOCATED


@on_virtual_time
async def test_a_model_of_mixed_precision_may_write_other_tokens() -> None:
    worker = decode()
    wrong = Delta("close", [1], FinishReason.STOP, Usage(1, 1))
    worker.starts.extend([[], [wrong]])
    async with running(prefill(), worker, mixed_precision=True) as core:
        assert verdicts(core) == {("p", "d"): ""}
        assert "answers differ, as mixed_precision allows" in {e["event"] for e in core.logs}


# Pairs that cannot be.


@on_virtual_time
async def test_different_pools_are_refused_for_good_without_a_probe() -> None:
    worker = prefill(fingerprint=replace(FINGERPRINT, block_size=16, kv_dtype="fp8"))
    async with running(worker, decode()) as core:
        await asyncio.sleep(2 * RETRY_S)
        assert verdicts(core) == {
            ("p", "d"): "kv_dtype is 'fp8' on the prefill side and 'bfloat16' on the decode side; "
            "block_size is 16 on the prefill side and 32 on the decode side"
        }
        assert worker.served == []


@on_virtual_time
async def test_workers_without_a_common_transport_are_no_pair() -> None:
    worker = prefill(transports=("grpc",))
    async with running(worker, decode()) as core:
        assert verdicts(core) == {("p", "d"): "no KV transport in common"}
        assert worker.served == []


@on_virtual_time
async def test_workers_of_different_models_are_no_pair() -> None:
    async with running(prefill(model="other"), decode()) as core:
        assert verdicts(core) == {}
        assert core.worker("p").detail == "serves 'other', which is not in coordinator.models"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"layout": "HND"}, "layout is 'HND' on the prefill side and 'NHD' on the decode side"),
    ],
)
def test_differences(change: dict[str, Any], words: str) -> None:
    assert differences(replace(FINGERPRINT, **change), FINGERPRINT) == words


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
        assert core.fleet.snapshot("tiny").pairs == frozenset()
        second.open()
        await settle()
        assert core.fleet.snapshot("tiny").pairs == {("p", "d")}


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
