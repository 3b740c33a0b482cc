"""An operator takes workers out: what runs there ends well, nothing new comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cli.drain import drain as drain_command
from cli.failure import CliError
from coordinator.policy.health import WorkerState
from pdserve.types import Mode, Role
from tests.support.asking import TEXT, body, events, http_whole, prefill
from tests.support.gated_worker import GatedWorker
from tests.support.sim_fleet import SimFleet, sim_fleet

TOKENS = 200
MID_STREAM = 5
"""Steps after which a worker that writes an answer stands still."""


async def drained(fleet: SimFleet, worker_id: str, deadline_s: float = 30) -> int:
    """What was unfinished."""
    answer = await fleet.coordinator.http.put(
        f"/fleet/workers/{worker_id}/drain", params={"deadline_s": deadline_s}
    )
    assert answer.status_code == 200, answer.text
    told: int = answer.json()["unfinished"]
    return told


def decode(worker_id: str = "d") -> GatedWorker:
    return GatedWorker(worker_id, Role.DECODE)


async def stream(fleet: SimFleet, begun: asyncio.Event) -> str:
    """The text of one streamed answer, which must be complete."""
    request = body(TEXT, stream=True, max_tokens=TOKENS, ignore_eos=True)
    request["stream_options"] = {"include_usage": True}
    async with fleet.coordinator.http.stream("POST", "/v1/completions", json=request) as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            begun.set()
    *chunks, last, usage, done = events(lines)
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == TOKENS
    return "".join(chunk["choices"][0]["text"] for chunk in (*chunks, last))


async def held_in_stream(
    fleet: SimFleet, workers: Sequence[GatedWorker]
) -> tuple[asyncio.Task[str], GatedWorker]:
    """An answer that stands still in mid-stream, as all the workers do, and who writes it."""
    for worker in workers:
        worker.stop_after(MID_STREAM)
    begun = asyncio.Event()
    streaming = asyncio.create_task(stream(fleet, begun))
    await begun.wait()
    (busy,) = (worker for worker in workers if worker.workload.unfinished)
    return streaming, busy


async def test_a_drained_decode_worker_ends_what_it_has_and_gets_nothing_new() -> None:
    workers = decode("d1"), decode("d2")
    async with sim_fleet(*workers) as fleet:
        core = fleet.coordinator
        streaming, busy = await held_in_stream(fleet, workers)
        (other,) = (worker for worker in workers if worker is not busy)
        other.gates.steps.open()
        draining = asyncio.create_task(drained(fleet, busy.worker_id))
        entry = core.fleet.by_id(busy.worker_id)
        assert entry is not None
        await core.until(lambda: entry.state is WorkerState.DRAINING)
        for _ in range(4):
            await http_whole(core, TEXT, Mode.COLOCATED)
        assert not streaming.done()
        busy.gates.steps.open()
        await streaming
        assert await draining == 0
        assert busy.metric("sequences_total", role="decode", outcome="finished") <= 2, (
            "its probe and the stream"
        )
        assert other.metric("sequences_total", role="decode", outcome="finished") >= 4


async def test_what_runs_at_the_deadline_goes_on_elsewhere() -> None:
    workers = decode("d1"), decode("d2")
    async with sim_fleet(*workers) as fleet:
        streaming, busy = await held_in_stream(fleet, workers)
        assert await drained(fleet, busy.worker_id, deadline_s=0) == 0
        assert not streaming.done()
        for worker in workers:
            worker.gates.steps.open()
        assert await streaming == await stream(fleet, asyncio.Event())


async def test_where_nobody_else_is_ready_it_stays_and_is_told() -> None:
    worker = decode()
    async with sim_fleet(worker) as fleet:
        streaming, _ = await held_in_stream(fleet, [worker])
        assert await drained(fleet, "d", deadline_s=0) == 1
        worker.gates.steps.open()
        await streaming


async def test_a_drained_prefill_worker_is_left_for_another() -> None:
    async with sim_fleet(prefill("p1"), prefill("p2"), decode()) as fleet:
        assert await drained(fleet, "p1") == 0
        answers = [
            await http_whole(fleet.coordinator, f"{number} {TEXT}", Mode.DISAGGREGATED)
            for number in range(3)
        ]
        assert {answer.mode for answer in answers} == {"disaggregated"}
        assert {answer.reason for answer in answers} == {"disaggregated: asked for by the request"}


async def test_the_command_says_what_became_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    workers = decode("d1"), decode("d2")
    async with sim_fleet(*workers) as fleet:
        url = f"http://{fleet.coordinator.addresses['http']}"
        await asyncio.to_thread(drain_command, "d1", url, None, 5.0)
        told = capsys.readouterr().out.splitlines()[-1]
        assert told == "d1 is drained; it takes work again when it is restarted"
        with pytest.raises(CliError, match="no worker 'd9' is connected"):
            await asyncio.to_thread(drain_command, "d9", url, None, 5.0)
        streaming, busy = await held_in_stream(fleet, workers)
        assert busy.worker_id == "d2"
        with pytest.raises(CliError, match="d2 takes nothing new, but has not finished 1 yet"):
            await asyncio.to_thread(drain_command, "d2", url, None, 0.0)
        busy.gates.steps.open()
        await streaming
