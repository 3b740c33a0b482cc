"""`pdserve ab` on a coordinator: an experiment from its start to its report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from pdserve.types import Role
from tests.support.asking import decode, prefill
from tests.support.sim_fleet import MODEL, SimCoordinator, SimFleetWorker, sim_fleet

ASKED = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


async def ab(core: SimCoordinator, *words: str) -> str:
    """What the command prints, and what the coordinator logs meanwhile."""
    url = f"http://{core.addresses['http']}"
    given = await asyncio.to_thread(CliRunner().invoke, app, ["ab", *words, "--url", url])
    return given.output


async def test_an_experiment_is_started_looked_at_and_stopped() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        assert "no experiment has run here" in await ab(core, "status")
        modes = ("colocated", "disaggregated")
        started = await ab(core, "start", *modes, "--assignment", "sticky", "--washout", "0")
        assert f"colocated-or-disaggregated of {MODEL} runs" in started
        for _ in range(8):
            assert (await core.http.post("/v1/completions", json=ASKED)).is_success
        line = f"colocated-or-disaggregated of {MODEL}: sticky, running"
        assert line in await ab(core, "status")
        told = await ab(core, "report", "--gpu-hour", "2")
        assert line in told
        assert "not yet known, for no block is complete" in told
        assert "normalised per GPU (or worker): colocated can use 1, disaggregated 2" in told
        assert "|" not in told, "a table is no Markdown, also where it is piped"
        assert "**" not in told
        assert "is running: stop it" in await ab(core, "start", *modes)
        assert "sticky, ended" in await ab(core, "stop", "--model", MODEL)
        assert "is running" in await ab(core, "stop")
        assert '"running": false' in await ab(core, "report", "--json")


async def test_a_file_has_whole_policies(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(
        f"name: deciders\nmodel: {MODEL}\nassignment: interleaved\narms:\n"
        "- {name: by-length, mode: auto, decider: threshold, min_prefill_tokens: 64}\n"
        "- {name: by-estimate, mode: auto, decider: estimate}\n"
    )
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        assert "deciders of " in await ab(core, "start", "--file", str(file))
        headers = (await core.http.post("/v1/completions", json=ASKED)).headers
        assert headers["x-pdserve-reason"].startswith("auto: experiment deciders, arm by-")
        assert "name two modes or more" in await ab(core, "start")
        assert "--file says all of it" in await ab(
            core, "start", "--file", str(file), "--slot", "5"
        )
        for flag in ("--slot", "--washout"):
            assert flag in await ab(core, "start", "auto", "colocated", flag, "inf")
        assert "no such file" in (await ab(core, "start", "--file", f"{file}.not")).lower()


async def test_a_model_with_adapters_is_still_the_only_one() -> None:
    """They take part in its experiment; none has one of its own."""
    workers = [
        SimFleetWorker(name, role, adapters=("polite",))
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    async with sim_fleet(*workers, lora={"polite": "/adapters/polite"}) as fleet:
        core = fleet.coordinator
        assert f"of {MODEL} runs" in await ab(core, "start", "colocated", "disaggregated")
        answer = await core.http.post("/v1/completions", json={**ASKED, "model": "polite"})
        assert answer.headers["x-pdserve-arm"] in ("colocated", "disaggregated")
        assert f"of {MODEL}: interleaved" in await ab(core, "report")
        assert "no model 'polite'" in await ab(
            core, "start", "auto", "colocated", "--model", "polite"
        )


@pytest.mark.parametrize("name", ["..", ".", "a/../b", "a?b#c", "%2e%2e", "é"])
async def test_no_name_leads_to_another_page(name: str) -> None:
    async with sim_fleet(decode()) as fleet:
        core = fleet.coordinator
        assert "has had no experiment here" in await ab(core, "report", "--model", name)
        url = f"http://{core.addresses['http']}"
        for command, words in (("trace", "is remembered here"), ("drain", "is connected")):
            told = await asyncio.to_thread(
                CliRunner().invoke, app, [command, "--url", url, "--", name]
            )
            assert words in told.output, told.output
