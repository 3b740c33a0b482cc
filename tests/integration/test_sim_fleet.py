"""A coordinator and its workers over sockets: routes, faults, restarts; idle when all is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config import Arm, Experiment, SimConfig
from pdserve.errors import ErrorReason
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import Fallback, Mode, Role
from pdserve.v1 import generation_pb2, inference_pb2
from tests.support.sim_fleet import (
    FAST,
    MODEL,
    WITHIN_S,
    Answer,
    SimCoordinator,
    SimFleet,
    SimFleetWorker,
    coordinator,
    sim_fleet,
)

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
LONG_TEXT = TEXT * 4
MAX_TOKENS = 12
LONG_ANSWER = 3000
SLOW_READER = SimConfig(prefill_token_s=0.001, decode_step_s=0.001, chunk_tokens=16)
"""Takes most of a second to read LONG_TEXT, in short steps."""

Ask = Callable[[SimCoordinator, str, Mode], Coroutine[Any, Any, Answer]]


def prefill(worker_id: str = "p", sim: SimConfig = FAST) -> SimFleetWorker:
    return SimFleetWorker(worker_id, Role.PREFILL, sim=sim)


def decode(worker_id: str = "d", sim: SimConfig = FAST) -> SimFleetWorker:
    return SimFleetWorker(worker_id, Role.DECODE, sim=sim)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": text,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        **fields,
    }


def message(text: str, mode: Mode | None, max_tokens: int = MAX_TOKENS) -> Any:
    modes = {
        Mode.COLOCATED: generation_pb2.MODE_COLOCATED,
        Mode.DISAGGREGATED: generation_pb2.MODE_DISAGGREGATED,
        None: generation_pb2.MODE_UNSPECIFIED,
    }
    return inference_pb2.GenerateRequest(
        model=MODEL,
        text=text,
        sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
        options=inference_pb2.RequestOptions(mode=modes[mode]),
    )


def events(lines: list[str]) -> list[Any]:
    """The data of server-sent events; the closing [DONE] as it is."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def http_whole(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    response = await core.http.post(
        "/v1/completions", json=body(text), headers={"x-pdserve-mode": mode.value}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    used = answer["usage"]["completion_tokens"]
    return Answer(choice["text"], choice["finish_reason"], used, response.headers)


async def http_streamed(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    request = body(text, stream=True, stream_options={"include_usage": True})
    async with core.http.stream(
        "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode.value}
    ) as response:
        *chunks, usage, done = events([line async for line in response.aiter_lines()])
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    return Answer(
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["usage"]["completion_tokens"],
        response.headers,
    )


async def metadata_of(call: Any) -> dict[str, str]:
    return {key: str(value) for key, value in await call.initial_metadata()}


def finish_word(number: int) -> str:
    name = generation_pb2.FinishReason.Name(number)  # type: ignore[arg-type]
    return name.removeprefix("FINISH_REASON_").lower()


async def grpc_whole(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    call = core.grpc.Generate(message(text, mode))
    answer = await call
    return Answer(
        answer.text,
        finish_word(answer.finish_reason),
        answer.usage.completion_tokens,
        await metadata_of(call),
    )


async def grpc_streamed(core: SimCoordinator, text: str, mode: Mode) -> Answer:
    request = inference_pb2.GenerateStreamRequest(request=message(text, mode))
    call = core.grpc.GenerateStream(request)
    pieces = [piece async for piece in call]
    last = pieces[-1]
    return Answer(
        "".join(piece.text for piece in pieces),
        finish_word(last.finish_reason),
        last.usage.completion_tokens,
        await metadata_of(call),
    )


ASKS = {
    "HTTP": http_whole,
    "HTTP, streamed": http_streamed,
    "gRPC": grpc_whole,
    "gRPC, streamed": grpc_streamed,
}


# One fleet for what changes nothing.


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
async def test_the_answer_is_the_same_on_every_way(ask: Ask) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        expected = await http_whole(fleet.coordinator, TEXT, Mode.COLOCATED)
        assert expected.text
        for mode in (Mode.COLOCATED, Mode.DISAGGREGATED):
            answer = await ask(fleet.coordinator, TEXT, mode)
            assert answer.text == expected.text
            assert answer.finish_reason == expected.finish_reason
            assert answer.completion_tokens == expected.completion_tokens
            assert answer.mode == mode
            assert answer.reason == f"{mode}: asked for by the request"
            assert answer.headers["x-request-id"]


async def test_a_crowd_on_both_routes_is_answered_as_each_alone() -> None:
    async with sim_fleet(prefill("p1"), prefill("p2"), decode("d1"), decode("d2")) as fleet:
        texts = [f"{number} {TEXT}" for number in range(16)]
        alone = [await http_whole(fleet.coordinator, text, Mode.COLOCATED) for text in texts]
        crowd = await asyncio.gather(
            *(
                ask(fleet.coordinator, text, mode)
                for text, (ask, mode) in zip(
                    texts,
                    [(ask, mode) for mode in (Mode.DISAGGREGATED, Mode.COLOCATED)
                     for ask in ASKS.values()] * 2,
                    strict=True,
                )
            )
        )  # fmt: skip
        assert [answer.text for answer in crowd] == [answer.text for answer in alone]


async def test_a_hand_off_moves_bytes_and_a_colocated_answer_does_not() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        writer = fleet.workers["d"]

        def moved() -> float:
            return writer.metric("kv_transfer_bytes_total", transport="sim")

        before = moved()
        await http_whole(fleet.coordinator, TEXT, Mode.COLOCATED)
        assert moved() == before
        await http_whole(fleet.coordinator, TEXT, Mode.DISAGGREGATED)
        assert moved() - before == len(TEXT) * FAST.kv_bytes_per_token


async def test_what_the_prefix_cache_of_the_prefill_worker_saved_is_told() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        usages = []
        for _ in range(2):
            response = await fleet.coordinator.http.post(
                "/v1/completions", json=body(TEXT), headers={"x-pdserve-mode": "disaggregated"}
            )
            usages.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert usages[0] == 0
        assert 0 < usages[1] < len(TEXT)


async def test_operators_see_the_fleet() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        http = fleet.coordinator.http
        ready = await http.get("/health/ready")
        assert ready.status_code == 200
        view = (await http.get("/fleet")).json()
        assert {worker["id"]: worker["state"] for worker in view["workers"]} == {
            "p": "ready",
            "d": "ready",
        }
        assert [(pair["prefill"], pair["decode"]) for pair in view["pairs"]] == [("p", "d")]
        for worker in fleet.workers.values():
            assert worker.address not in json.dumps(view)
        await http_whole(fleet.coordinator, TEXT, Mode.DISAGGREGATED)
        text = (await http.get("/metrics")).text
        counted = {
            (sample.labels["mode"], sample.labels["outcome"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pdserve_requests_total"
        }
        assert counted == {("disaggregated", "ok"): 1}


# Which way a request goes.


async def test_auto_goes_by_the_length_that_is_not_cached() -> None:
    threshold = 100
    async with sim_fleet(
        prefill(), decode(), mode=Mode.AUTO, min_prefill_tokens=threshold
    ) as fleet:
        modes = []
        for text in ("x" * (threshold - 1), "y" * threshold, "y" * threshold):
            response = await fleet.coordinator.http.post("/v1/completions", json=body(text))
            modes.append(response.headers["x-pdserve-mode"])
        assert modes == ["colocated", "disaggregated", "colocated"]


async def test_an_experiment_splits_traffic_and_keeps_sessions_together() -> None:
    arms = (Arm(name="a", mode=Mode.COLOCATED), Arm(name="b", mode=Mode.DISAGGREGATED))
    split = Experiment(name="split", model=MODEL, key="session", arms=arms)
    async with sim_fleet(prefill(), decode(), experiments=(split,)) as fleet:
        met: dict[str, set[tuple[str, str]]] = {}
        for session in "abcdefgh" * 2:
            response = await fleet.coordinator.http.post(
                "/v1/completions", json=body("hi"), headers={"x-pdserve-session": session}
            )
            headers = response.headers
            met.setdefault(session, set()).add(
                (headers["x-pdserve-arm"], headers["x-pdserve-mode"])
            )
        assert all(len(arms) == 1 for arms in met.values())
        assert set.union(*met.values()) == {("a", "colocated"), ("b", "disaggregated")}
        core = fleet.coordinator
        by_arm = [core.metric("requests_total", arm=arm, outcome="ok") for arm in "ab"]
        assert sum(by_arm) == 16
        assert all(by_arm)
        assert core.metric("time_to_first_token_seconds_count", arm="b") == by_arm[1]


# Faults.


async def in_prefill(fleet: SimFleet, worker_id: str = "p") -> None:
    await fleet.workers[worker_id].until(lambda load: load.running > 0)


async def test_a_prefill_worker_killed_in_mid_prefill_costs_a_detour() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        expected = await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        await fleet.workers.pop("p").kill()
        answer = await asking
        assert answer.text == expected.text
        assert answer.mode == "colocated"
        assert answer.reason == (
            "disaggregated: asked for by the request; fell back to colocated: "
            "the connection to the worker was lost"
        )
        assert fleet.coordinator.metric("fallbacks_total", reason="prefill_failed") == 1


async def test_a_prefill_worker_killed_in_mid_prefill_is_an_error_without_fallback() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode(), fallback=Fallback.FAIL) as fleet:
        asking = asyncio.create_task(
            fleet.coordinator.http.post(
                "/v1/completions",
                json=body(LONG_TEXT, stream=True),
                headers={"x-pdserve-mode": "disaggregated"},
            )
        )
        await in_prefill(fleet)
        await fleet.workers.pop("p").kill()
        response = await asking
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "prefill_failed"


async def stream_lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_a_decode_worker_killed_in_mid_stream_is_told_over_http(mode: str) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        request = body(TEXT, stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)
        async with fleet.coordinator.http.stream(
            "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode}
        ) as response:
            assert response.status_code == 200
            lines = stream_lines(response)
            seen = [await anext(lines) for _ in range(3)]
            await fleet.workers.pop("d").kill()
            seen += [line async for line in lines]
        *chunks, error = events(seen)
        assert all("choices" in chunk for chunk in chunks)
        assert error["error"]["code"] == "decode_failed"
        assert fleet.coordinator.metric("requests_total", reason="decode_failed") == 1


async def test_a_decode_worker_killed_in_mid_stream_is_told_over_grpc() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        asked = message(TEXT, None, LONG_ANSWER)
        asked.sampling.ignore_eos = True
        call = fleet.coordinator.grpc.GenerateStream(
            inference_pb2.GenerateStreamRequest(request=asked)
        )
        assert await call.read() is not grpc.aio.EOF
        await fleet.workers.pop("d").kill()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        told = from_rpc_error(failure.value, ErrorReason.INTERNAL)
        assert told.reason is ErrorReason.DECODE_FAILED


async def test_a_decode_worker_killed_before_the_first_token_is_not_noticed() -> None:
    async with sim_fleet(decode("d1", SLOW_READER), decode("d2", SLOW_READER)) as fleet:
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED))
        async with asyncio.timeout(WITHIN_S):
            waits = {
                asyncio.create_task(in_prefill(fleet, worker_id)): worker_id
                for worker_id in fleet.workers
            }
            done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        await fleet.workers.pop(waits[done.pop()]).kill()
        answer = await asking
        assert answer.completion_tokens == MAX_TOKENS
        assert "tried again: " in answer.reason


async def test_a_worker_that_comes_back_is_proven_and_used_again() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for worker in fleet.workers.values():
            (old,) = core.fleet.pairs
            await worker.kill()
            await worker.start()
            await core.until(lambda old=old: set(core.fleet.pairs) - {old} != set())  # type: ignore[misc]
            await core.until_proven(("p", "d"))
            answer = await http_whole(core, TEXT, Mode.DISAGGREGATED)
            assert answer.mode == "disaggregated"


# Clients that leave.


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_an_http_client_that_leaves_in_mid_stream_frees_the_fleet(mode: str) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        request = body(TEXT, stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)
        async with fleet.coordinator.http.stream(
            "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode}
        ) as response:
            await anext(stream_lines(response))
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", outcome="cancelled") == 1


async def test_an_http_client_that_leaves_in_mid_prefill_frees_the_fleet() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        asking.cancel()
        await asyncio.wait([asking])
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", outcome="cancelled") == 1


async def test_a_grpc_call_that_is_cancelled_frees_the_fleet() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        call = fleet.coordinator.grpc.Generate(message(LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        call.cancel()
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", surface="grpc", outcome="cancelled") == 1


async def test_a_grpc_deadline_frees_the_fleet() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        call = fleet.coordinator.grpc.Generate(message(TEXT * 20, Mode.DISAGGREGATED), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await fleet.until_idle()


# Coordinators that come and go.


async def test_a_coordinator_that_ends_leaves_nothing_on_the_workers() -> None:
    workers = [await prefill().start(), await decode().start()]
    first, second = coordinator(workers), coordinator(workers)
    async with first.running():
        await first.until_proven(("p", "d"))
        asked = message(TEXT, Mode.DISAGGREGATED, LONG_ANSWER)
        asked.sampling.ignore_eos = True
        call = first.grpc.GenerateStream(inference_pb2.GenerateStreamRequest(request=asked))
        await call.read()
    async with asyncio.timeout(WITHIN_S):
        for worker in workers:
            await worker.until_idle()
    async with second.running():
        await second.until_proven(("p", "d"))
        assert (await grpc_whole(second, TEXT, Mode.DISAGGREGATED)).mode == "disaggregated"
    for worker in workers:
        await worker.kill()


async def test_two_coordinators_share_the_workers() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        other = coordinator(list(fleet.workers.values()))
        async with other.running():
            await other.until_proven(("p", "d"))
            texts = await asyncio.gather(
                *(
                    http_whole(core, TEXT, mode)
                    for core in (fleet.coordinator, other)
                    for mode in (Mode.COLOCATED, Mode.DISAGGREGATED)
                )
            )
            assert len({answer.text for answer in texts}) == 1


async def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has() -> None:
    async with sim_fleet(decode("d1"), decode("d2")) as fleet:
        core = fleet.coordinator
        asked = message(TEXT, None, 200)
        asked.sampling.ignore_eos = True
        call = core.grpc.GenerateStream(inference_pb2.GenerateStreamRequest(request=asked))
        pieces = aiter(call)
        await anext(pieces)
        busy = next(w for w in fleet.workers.values() if w.workload.unfinished)
        busy.workload.start_drain()
        await core.until(lambda: len(core.fleet.snapshot(MODEL).decode) == 1)
        ended = busy.metric("sequences_total", role="decode", outcome="finished")
        for _ in range(3):
            await http_whole(core, TEXT, Mode.COLOCATED)
        assert busy.metric("sequences_total", role="decode", outcome="finished") <= ended + 1
        *_, last = [piece async for piece in pieces]
        assert last.usage.completion_tokens == 200
