"""What a ledger says, as `/usage` gives it out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from coordinator.gateway.charge import Charge
from coordinator.gateway.ledger_store import Sums
from coordinator.policy.pricing import NANO

_COSTS = ("prefill_cost", "decode_cost", "cost")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def columns_of_groups(by: str) -> list[str]:
    """The names in a row of `of_groups`, also where there is none."""
    return [by, *_kept(Sums, "group"), *_COSTS, "cost_per_request", "cost_per_million_tokens"]


def columns_of_requests() -> list[str]:
    """Likewise of `of_requests`."""
    return ["at", *_kept(Charge, "at_us"), *_COSTS]


def of_groups(by: str, sums: Iterable[Sums]) -> list[dict[str, Any]]:
    """A row for each group: counts, costs by phase, and what a request and a million tokens,
    prompt and answer together, came to."""
    return [
        {by: _named(by, each.group), **_money(_rest(each, "group")), **_means(each)}
        for each in sums
    ]


def of_requests(charges: Iterable[Charge]) -> list[dict[str, Any]]:
    """A row for each charge; its time in ISO 8601."""
    return [
        {"at": _time(charge.at_us).isoformat(), **_money(_rest(charge, "at_us"))}
        for charge in charges
    ]


def _kept(kind: type[Sums | Charge], left_out: str) -> list[str]:
    names = (field.name for field in fields(kind))
    return [name for name in names if name != left_out and not name.endswith("_nano")]


def _named(by: str, group: str | int) -> str:
    if by != "day":
        return str(group)
    return (_EPOCH + timedelta(days=int(group))).date().isoformat()


def _rest(row: Sums | Charge, left_out: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != left_out}


def _money(row: dict[str, Any]) -> dict[str, Any]:
    prefill, decode = row.pop("prefill_nano"), row.pop("decode_nano")
    return row | {
        "prefill_cost": prefill / NANO,
        "decode_cost": decode / NANO,
        "cost": (prefill + decode) / NANO,
    }


def _means(sums: Sums) -> dict[str, float]:
    cost = (sums.prefill_nano + sums.decode_nano) / NANO
    tokens = sums.prompt_tokens + sums.completion_tokens
    return {
        "cost_per_request": cost / sums.requests,
        "cost_per_million_tokens": cost * 1e6 / tokens if tokens else 0.0,
    }


def _time(at_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at_us)
