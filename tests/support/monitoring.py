"""What the alert rules and the dashboard ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "k8s" / "monitoring"
RULES, RULES_TEST = FOLDER / "rules.yaml", FOLDER / "rules.test.yaml"
_NAME = re.compile(r"\bpdserve[a-z0-9_:]*")
_PARTS = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> Iterator[str]:
    """As Prometheus is asked, with Grafana's variables filled in."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")


def names_used() -> set[str]:
    """Of metrics, not of what the rules record."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()] + list(dashboard_expressions())
    return {name for text in expressions for name in _NAME.findall(text)} - recorded


def names_of(family: str, kind: str) -> set[str]:
    """The names that a family's samples have."""
    return {family.removesuffix("_total") + part for part in _PARTS.get(kind, ())}
