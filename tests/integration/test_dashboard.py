"""The dashboard in a real browser, over a fleet of simulated workers."""

from __future__ import annotations

import asyncio
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Locator, Page, expect

from coordinator.experiments import Experiments
from coordinator.gateway.keys import KeyRing, new_key
from pdserve.ab.report import decide
from pdserve.ab.slots import experiment
from pdserve.config_experiment import Arm, Experiment
from pdserve.types import Mode, Role
from tests.support.browser import browser_page
from tests.support.http_facade import http_facade
from tests.support.sim_fleet import FAST, MODEL, SimFleetWorker, sim_fleet

SLOW = FAST.model_copy(
    update={"prefill_token_s": 0.001, "decode_step_s": 0.005, "transfer_token_s": 0.0005}
)
HTML = "<img src=x onerror=alert(1)>"
EVERY_MS = 2_000
ARMS = (Arm(name="whole", mode=Mode.COLOCATED), Arm(name="split", mode=Mode.DISAGGREGATED))
TRIAL = Experiment(name="split-or-not", model=MODEL, arms=ARMS)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Experiments tell as many blocks as the list adds up to, in each of which some 26 of 100
    requests were good in the first arm, and some 75 in the other, on twice as many GPUs."""
    blocks: list[int] = []
    report = Experiments.report

    def told(self: Experiments, model: str) -> dict[str, Any]:
        slots = [
            {
                "block": block, "arm": arm.name, "asked": 100, "good": good, "good_tokens": good,
                "seconds": 50.0, "ttft_s": None, "itl_s": None,
            }
            for block in range(sum(blocks))
            for arm, good in zip(ARMS, (20 + block % 5 * 3, 90 - block % 7 * 5), strict=True)
        ]  # fmt: skip
        return {**(report(self, model) or {}), "slots": slots}

    monkeypatch.setattr(Experiments, "report", told)
    return blocks


def lane(low: float, high: float) -> list[float]:
    """Where an interval's bar begins and how wide it is, in percent: -100 % is at the left, nothing
    in the middle, and twice as much two thirds of the way."""
    left, right = (50 + 50 * (1 if math.isinf(x) else x / (2 + x)) for x in (low, high))
    return [pytest.approx(left, abs=0.01), pytest.approx(right - left, abs=0.01)]


async def bar(trial: Locator) -> list[float]:
    style = await trial.locator(".piece").get_attribute("style") or ""
    return [float(number) for number in re.findall(r"([\d.]+)%", style)]


async def load(page: Page, url: str) -> None:
    """Opens the dashboard with a clock that goes on by hand; its first data is there."""
    await page.clock.install()
    await page.goto(f"{url}/dashboard")
    await expect(page.locator("#told")).to_contain_text("as of")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_fleet_and_requests_are_shown_as_they_are(
    scheme: Literal["light", "dark"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = counted(monkeypatch)
    workers = (
        SimFleetWorker("prefill-1", Role.PREFILL, sim=SLOW),
        SimFleetWorker(HTML, Role.DECODE, sim=SLOW),
    )
    async with (
        sim_fleet(*workers, experiments=(TRIAL,), transport="nixl") as fleet,
        browser_page(scheme) as page,
    ):

        async def ask(mode: str, name: str, size: int) -> None:
            await fleet.coordinator.http.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "word " * size, "max_tokens": 20},
                headers={"x-pdserve-mode": mode, "x-request-id": name},
            )

        await load(page, f"http://{fleet.coordinator.addresses['http']}")
        assert await page.locator("#ready").text_content() == "ready"
        asked = [ask("colocated", f"short-{number}", 5) for number in range(4)]
        asked += [ask("disaggregated", f"handed-{number}", 10) for number in range(4)]
        await asyncio.gather(*asked, ask("disaggregated", "slow", 200))
        await page.clock.fast_forward(EVERY_MS)
        slowest = page.locator("#slowest tr.pick")
        await expect(slowest.first).to_contain_text("slow")
        await expect(slowest.first).to_contain_text("disaggregated")
        await expect(page.locator("#recent tr.pick")).to_have_count(9)

        rows = page.locator("#workers tr")
        await expect(rows).to_have_count(3)
        await expect(rows.filter(has_text="prefill-1")).to_contain_text("ready")
        assert await page.locator("img").count() == 0, "a name became HTML"
        assert await rows.filter(has_text=HTML).count() == 1

        for arm in ARMS:
            shown = page.locator("#arms tr", has_text=arm.name).filter(has_text=arm.mode.value)
            await expect(shown).to_contain_text("running")
        trials = page.locator("#verdicts > div")
        await expect(trials).to_contain_text(
            "whole or split: not yet known, for no block is complete"
        )
        await expect(trials).to_contain_text("split: nothing known")
        assert await bar(trials) == lane(-1.0, math.inf) == [0, 100]
        blocks.append(24)
        await page.clock.fast_forward(EVERY_MS)
        await expect(trials).to_contain_text("whole or split: disaggregate")
        await expect(trials).to_contain_text("24 blocks, 4800 requests")
        report = fleet.coordinator.ops.experiment(MODEL)
        [known] = decide(experiment(report))
        assert known.goodput.change.low > 0
        assert await bar(trials) == lane(known.goodput.change.low, known.goodput.change.high)

        for name in ("ttfts", "itls"):
            for mode in ("colocated", "disaggregated"):
                shown = page.locator(f"#{name} tr", has_text=mode).locator("td")
                await expect(shown).to_have_count(4)
                await expect(shown.nth(3)).to_contain_text("s")
        # Of the last ten seconds, and all that may be longer ago.
        await ask("disaggregated", "just now", 5)
        await page.clock.fast_forward(EVERY_MS)
        answered = page.locator("#flows tr", has_text="disaggregated").locator("td").nth(1)
        await expect(answered).to_have_text(re.compile(r"^(?!0\.0$)\d"))

        await expect(page.locator("#one")).to_be_hidden()
        await slowest.first.click()
        await expect(page.locator("#title")).to_contain_text("slow")
        for phase in ("queue", "prefill", "transfer", "first step", "decode"):
            await expect(page.locator("#fall")).to_contain_text(phase)
        await page.clock.fast_forward(EVERY_MS)
        await expect(page.locator("#one")).to_be_visible()
        folder = Path(os.environ.get("PDSERVE_SCREENSHOTS", tmp_path))
        await page.screenshot(path=folder / f"dashboard-{scheme}.png", full_page=True)
    assert (folder / f"dashboard-{scheme}.png").stat().st_size > 10_000


async def test_a_coordinator_that_counts_from_the_start_again_shows_no_traffic_below_none() -> None:
    worker = SimFleetWorker("d", Role.DECODE, sim=FAST)
    async with sim_fleet(worker) as fleet, browser_page() as page:

        async def ask(times: int) -> None:
            for _ in range(times):
                await fleet.coordinator.http.post(
                    "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2}
                )

        await ask(1)
        early = (await fleet.coordinator.http.get("/dashboard/data")).text
        await ask(4)
        await load(page, f"http://{fleet.coordinator.addresses['http']}")
        await ask(1)
        await page.clock.fast_forward(EVERY_MS)
        answered = page.locator("#flows tr", has_text="colocated").locator("td").nth(1)
        await expect(answered).to_have_text(re.compile(r"^\d"))
        await page.route("**/dashboard/data", lambda route: route.fulfill(body=early))
        await page.clock.fast_forward(EVERY_MS)
        await expect(answered).to_have_text("\N{EN DASH}")


async def test_a_key_is_asked_for_where_there_are_keys() -> None:
    user, user_entry = new_key("acme")
    admin, admin_entry = new_key("ops", admin=True)
    async with (
        http_facade(keys=KeyRing([user_entry, admin_entry])) as facade,
        browser_page() as page,
    ):
        answer = await facade.client.get("/dashboard")
        assert answer.status_code == 200
        assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
        assert (await facade.client.get("/dashboard/data")).status_code == 401

        await page.goto(f"http://{facade.address}/dashboard")
        door, field = page.locator("#door"), page.locator("#key")
        await expect(door).to_be_visible()
        for key, words in (("pd-wrong", "key"), (user, "this needs an admin key")):
            await field.fill(key)
            await field.press("Enter")
            await expect(page.locator("#refusal")).to_contain_text(words)
        await field.fill(admin)
        await field.press("Enter")
        await expect(door).to_be_hidden()
        await expect(page.locator("#told")).to_contain_text("as of")
        assert admin not in await page.content()
        await page.reload()
        await expect(page.locator("#told")).to_contain_text("as of")
        await page.get_by_text("forget the key").click()
        await expect(door).to_be_visible()
