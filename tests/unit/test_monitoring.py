"""The alert rules and the dashboard ask for what there is, and alert when they should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from coordinator.gateway.ledger import LedgerMetrics
from coordinator.metrics import CoordinatorMetrics
from pdserve.metrics import WorkerMetrics
from pdserve.types import Role
from pdserve.worker_service import WorkerIdentity
from pdserve.workload import Workload
from tests.support.monitoring import (
    RULES_TEST,
    dashboard_expressions,
    names_of,
    names_used,
    rules,
)
from tests.support.tools import tool


def promtool(*args: str) -> str:
    """What it prints; fails when it does."""
    done = subprocess.run([tool("promtool"), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_metric_that_is_asked_for_is_one_of_ours() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    LedgerMetrics(registry)
    worker = CollectorRegistry()
    metrics = WorkerMetrics(worker)
    identity = WorkerIdentity("w", "epoch", frozenset({Role.DECODE}), "tiny")
    metrics.watch(Workload(metrics.sequence_ended), identity, "sim")
    exposed = {
        name
        for family in (*registry.collect(), *worker.collect())
        for name in names_of(family.name, family.type)
    }
    assert names_used()
    assert names_used() <= exposed


def test_each_alert_says_how_grave_it_is_and_what_is_wrong() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in alerts)
    assert all(rule["annotations"]["summary"] for rule in alerts)
    tested = yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]
    told = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert {rule["alert"] for rule in alerts} == told


def test_alerts_are_raised_when_they_should_be_and_not_otherwise() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(RULES_TEST))


def test_prometheus_understands_the_dashboard(tmp_path: Path) -> None:
    panels = [
        {"record": f"panel_{number}", "expr": expression}
        for number, expression in enumerate(dashboard_expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    assert f"SUCCESS: {len(panels)} rules found" in promtool("check", "rules", str(file))
