"""A coordinator and its workers over sockets: every way to ask, every route, one answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config_experiment import Arm, Experiment
from pdserve.types import Mode
from tests.support.asking import (
    ASKS,
    LONG_TEXT,
    TEXT,
    Ask,
    body,
    decode,
    http_whole,
    prefill,
)
from tests.support.sim_fleet import (
    FAST,
    MODEL,
    sim_fleet,
)

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
            return writer.metric("kv_transfer_bytes_total", transport="nixl")

        before = moved()
        await http_whole(fleet.coordinator, TEXT, Mode.COLOCATED)
        assert moved() == before
        await http_whole(fleet.coordinator, TEXT, Mode.DISAGGREGATED)
        assert moved() - before == len(TEXT) * FAST.kv_bytes_per_token


async def test_over_grpc_the_transfer_overlaps_the_prefill() -> None:
    """By the decode worker's own times: it waits while the prompt is read, and little after."""
    slow = FAST.model_copy(update={"prefill_token_s": 0.0005, "transfer_token_s": 0.001})
    waits = {}
    for transport in ("nixl", "grpc"):
        async with sim_fleet(prefill(sim=slow), decode(sim=slow), transport=transport) as fleet:
            await http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED)
            phases = fleet.coordinator.registry.get_sample_value
            waits[transport] = phases(
                "pdserve_phase_seconds_sum",
                {"mode": "disaggregated", "arm": "none", "phase": "transfer"},
            )
    assert waits["grpc"] < 0.6 * waits["nixl"]


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
        keys = "prefill", "decode", "transport", "state"
        assert [tuple(pair[key] for key in keys) for pair in view["pairs"]] == [
            ("p", "d", "nixl", "proven"),
            ("p", "d", "grpc", "proven"),
        ]
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
        prefill(), decode(), mode=Mode.AUTO, decider="threshold", min_prefill_tokens=threshold
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
