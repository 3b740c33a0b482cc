"""Worker processes that stand still (SIGSTOP) in the middle of their work, and go on later."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.policy.health import WorkerState
from pdserve.config import SimConfig
from pdserve.types import Mode, Role
from tests.support.asking import LONG_TEXT, MAX_TOKENS, TEXT, body, events, http_whole, right_text
from tests.support.patience import within
from tests.support.worker_process import ProcessFleet, WorkerProcess, idle, process_fleet

ANSWERED_WITHIN_S = 8.0
"""From the moment at which a worker stood still; no client waits for more than ten seconds."""
READER = SimConfig(prefill_token_s=0.006, chunk_tokens=16)
"""Takes more than four seconds to read LONG_TEXT."""
WRITER = SimConfig(prefill_token_s=0.0002, decode_step_s=0.02, chunk_tokens=16)
ANSWER = 250
"""Takes the writer five seconds."""

PAIR = [("p", Role.PREFILL, READER), ("d", Role.DECODE, WRITER)]
TWO_DECODES = [*PAIR, ("d2", Role.DECODE, WRITER)]


async def goes_on(fleet: ProcessFleet, worker: WorkerProcess) -> None:
    """The worker comes back: it drops what it had, is proven anew, and answers as ever."""
    core = fleet.coordinator
    processes = {entry.process for entry in core.fleet.workers()}
    core.assert_idle()
    worker.go_on()
    await worker.until(idle)
    await core.until_all_proven()
    assert {entry.process for entry in core.fleet.workers()} == processes, "one was restarted"
    # The new session counts its sequences from 1, as the old one did.
    answers = [await http_whole(core, TEXT, mode) for mode in (Mode.COLOCATED, Mode.DISAGGREGATED)]
    assert [answer.mode for answer in answers] == ["colocated", "disaggregated"]
    assert len({answer.text for answer in answers}) == 1
    assert {answer.completion_tokens for answer in answers} == {MAX_TOKENS}


async def test_an_answer_goes_on_when_the_only_decode_worker_has_stood_still(
    tmp_path: Path,
) -> None:
    async with process_fleet(tmp_path, *PAIR) as fleet:
        core, worker = fleet.coordinator, fleet.workers["d"]
        request = body(TEXT, stream=True, max_tokens=ANSWER, ignore_eos=True)
        async with core.http.stream(
            "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": "disaggregated"}
        ) as response:
            lines = response.aiter_lines()
            seen = [await anext(lines) for _ in range(6)]
            worker.stop()
            await core.until(lambda: any(w.state is WorkerState.LOST for w in core.fleet.workers()))
            worker.go_on()
            seen += [line async for line in lines]
        *chunks, _done = events(seen)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == right_text(TEXT, ANSWER)
        assert core.metric("recoveries_total", outcome="continued") == 1
        await fleet.workers["p"].until(idle)
        await goes_on(fleet, worker)


async def test_a_prefill_worker_that_stands_still_in_mid_prefill_costs_a_detour(
    tmp_path: Path,
) -> None:
    async with process_fleet(tmp_path, *PAIR) as fleet:
        core, worker = fleet.coordinator, fleet.workers["p"]
        expected = await http_whole(core, LONG_TEXT, Mode.COLOCATED)
        asking = asyncio.create_task(http_whole(core, LONG_TEXT + "!", Mode.DISAGGREGATED))
        await worker.until(lambda load: load.running > 0)
        worker.stop()
        async with within(ANSWERED_WITHIN_S):  # and the prompt read anew
            answer = await asking
        assert answer.mode == "colocated"
        assert answer.reason.endswith("fell back to colocated: the prefill worker is silent")
        assert answer.completion_tokens == expected.completion_tokens
        await fleet.workers["d"].until(idle)
        await goes_on(fleet, worker)


async def test_a_decode_worker_that_stands_still_before_the_first_token_is_not_noticed(
    tmp_path: Path,
) -> None:
    async with process_fleet(tmp_path, *TWO_DECODES) as fleet:
        core, decodes = fleet.coordinator, [fleet.workers["d"], fleet.workers["d2"]]
        asking = asyncio.create_task(http_whole(core, LONG_TEXT, Mode.DISAGGREGATED))
        waits = {
            asyncio.create_task(worker.until(lambda load: load.reserved_tokens > 0)): worker
            for worker in decodes
        }
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        worker = waits[done.pop()]
        worker.stop()
        answer = await asking
        assert answer.mode == "disaggregated"
        assert "tried another decode worker: the decode worker was lost" in answer.reason
        await goes_on(fleet, worker)
