"""Where the time of a request went, as a client saw it and as operators are shown it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from coordinator.timelines import RECENT
from pdserve.config_experiment import Arm, Experiment
from pdserve.types import Mode, Role
from tests.support.sim_fleet import FAST, MODEL, SimFleetWorker, sim_fleet

# Long enough that what the machine itself takes is little beside it.
SLOW = FAST.model_copy(
    update={"prefill_token_s": 0.002, "decode_step_s": 0.01, "transfer_token_s": 0.001}
)
PROMPT = "a prompt of some length " * 8
ARMS = (
    Arm(name="a", mode=Mode.DISAGGREGATED, weight=1.0),
    Arm(name="b", mode=Mode.COLOCATED, weight=0),
)
SPLIT = Experiment(name="split", model=MODEL, arms=ARMS)


def pdserve(url: str, *args: str) -> Any:
    return CliRunner().invoke(app, [*args, "--url", url])


async def test_the_phases_of_a_request_add_up_to_what_its_client_saw() -> None:
    workers = (
        SimFleetWorker("p", Role.PREFILL, sim=SLOW),
        SimFleetWorker("d", Role.DECODE, sim=SLOW),
    )
    async with sim_fleet(*workers, experiments=(SPLIT,), transport="nixl") as fleet:
        http = fleet.coordinator.http
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}
        await http.get("/version")  # connects
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        seen_s = time.monotonic() - began
        assert answer.status_code == 200

        told = (await http.get("/fleet/requests/mine")).json()
        spent = dict(told["segments"])
        assert list(spent) == [
            *("tokenise", "queue", "reserve", "prefill_queue", "prefill"),
            *("decode_queue", "transfer", "first_step", "decode"),
        ]
        assert sum(spent.values()) == pytest.approx(told["duration_s"])
        assert told["ttft_s"] + spent["decode"] == pytest.approx(told["duration_s"])
        assert told["duration_s"] <= seen_s
        # As the engines are timed.
        tokens = len(PROMPT)
        assert spent["prefill"] >= tokens * SLOW.prefill_token_s
        assert spent["transfer"] == pytest.approx(tokens * SLOW.transfer_token_s)
        # All together: a first token that is read late is followed by others at once.
        writing = sum(spent[name] for name in ("decode_queue", "transfer", "first_step", "decode"))
        assert writing >= tokens * SLOW.transfer_token_s + 19 * SLOW.decode_step_s

        by_arm = {"mode": "disaggregated", "arm": "a", "phase": "transfer"}
        assert fleet.coordinator.metric("phase_seconds_count", **by_arm) == 1
        listed = (await http.get("/fleet/requests")).json()
        assert listed["recent"][0] == listed["slowest"][0] == told

        url = f"http://{fleet.coordinator.addresses['http']}"
        shown = await asyncio.to_thread(pdserve, url, "trace", "mine")
        assert shown.exit_code == 0
        for words in ("mine", "p → d", "first step", f"{len(PROMPT)} prompt", "total"):
            assert words in shown.output
        shown = await asyncio.to_thread(pdserve, url, "trace", "mine", "--json")
        assert json.loads(shown.output) == told

        missing = await asyncio.to_thread(pdserve, url, "trace", "other/one")
        assert missing.exit_code == 1
        (line,) = missing.stderr.splitlines()
        assert "no request 'other/one' is remembered here" in line
        assert str(RECENT) in line
