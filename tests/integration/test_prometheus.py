"""A real Prometheus scrapes a fleet and evaluates the alert rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from cli.ports import pick
from coordinator.gateway.ledger import LedgerMetrics
from pdserve.config import Listen
from pdserve.metrics import metrics_server
from pdserve.types import Role
from tests.support.monitoring import RULES, dashboard_expressions, names_of, names_used, rules
from tests.support.patience import WITHIN_S, happens
from tests.support.sim_fleet import MODEL, SimFleetWorker, sim_fleet
from tests.support.tools import tool

SCRAPE_S = 1


class Prometheus:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str, **params: str) -> Any:
        answer = (await self._client.get(f"/api/v1/{path}", params=params)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def until(self, path: str, condition: Callable[[Any], bool], **params: str) -> Any:
        """What it answers once the condition holds. It has no way to tell of news: it is asked."""

        async def told() -> Any:
            try:
                answer = await self.get(path, **params)
            except httpx.TransportError:
                return None  # still starting
            return answer if condition(answer) else None

        answer = await happens(told, WITHIN_S, SCRAPE_S / 10)
        assert answer is not None, f"never so: {path} {params}"
        return answer


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    """Scrapes the targets, host:port, every second; left, its process is gone."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "pdserve", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = pick(1)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        process = await asyncio.create_subprocess_exec(
            tool("prometheus"),
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stderr=log,
        )
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=WITHIN_S
            ) as client:
                yield Prometheus(client)
        finally:
            process.kill()
            await process.wait()


async def test_rules_and_dashboard_hold_on_what_a_fleet_exposes(tmp_path: Path) -> None:
    reader, writer = SimFleetWorker("p", Role.PREFILL), SimFleetWorker("d", Role.DECODE)
    with ExitStack() as stack:
        async with sim_fleet(reader, writer) as fleet:
            LedgerMetrics(fleet.coordinator.registry)
            targets = [fleet.coordinator.addresses["http"]] + [
                stack.enter_context(metrics_server(Listen(), worker.registry, None))
                for worker in (reader, writer)
            ]
            async with prometheus(tmp_path, targets) as scraper:
                for mode in ("colocated", "disaggregated"):
                    answer = await fleet.coordinator.http.post(
                        "/v1/completions",
                        json={"model": MODEL, "prompt": "hello", "max_tokens": 3},
                        headers={"x-pdserve-mode": mode},
                    )
                    assert answer.status_code == 200
                up = await scraper.until(
                    "query",
                    lambda told: len(told["result"]) == 3,
                    query='up == 1 and on (instance) (pdserve_requests_total{outcome="ok"} '
                    "or pdserve_build_info)",
                )
                assert {it["metric"]["instance"] for it in up["result"]} == set(targets)

                metadata = await scraper.get("targets/metadata")
                exposed = {name for it in metadata for name in names_of(it["metric"], it["type"])}
                assert names_used() <= exposed

                told = await scraper.until("rules", _all_evaluated)
                found = [rule for group in told["groups"] for rule in group["rules"]]
                assert len(found) == len(rules())
                assert {rule["health"] for rule in found} == {"ok"}, found
                firing = [rule["name"] for rule in found if rule.get("state") == "firing"]
                assert firing == []
                for expression in dashboard_expressions():
                    await scraper.get("query", query=expression)
                ready = await scraper.get("query", query="pdserve_route_ready")
                assert [it["value"][1] for it in ready["result"]] == ["1", "1"]


def _all_evaluated(told: Any) -> bool:
    return all(rule["health"] != "unknown" for group in told["groups"] for rule in group["rules"])
