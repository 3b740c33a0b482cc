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
    prompt and answer together, came to. Costs are None where there was no price."""
    rows = [{by: _named(by, each.group), **_money(_rest(each, "group"))} for each in sums]
    return [row | _means(row) for row in rows]


def of_requests(charges: Iterable[Charge]) -> list[dict[str, Any]]:
    """A row for each charge; its time in ISO 8601. Costs as in `of_groups`."""
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
    prefill = _cost(row.pop("prefill_nano"), row["prefill_gpu_s"])
    decode = _cost(row.pop("decode_nano"), row["decode_gpu_s"])
    whole = None if prefill is None or decode is None else prefill + decode
    return row | {"prefill_cost": prefill, "decode_cost": decode, "cost": whole}


def _cost(nano: int, gpu_s: float) -> float | None:
    """GPU seconds that cost nothing had no price: zero would be a figure that nobody has."""
    return None if gpu_s and not nano else nano / NANO


def _means(row: dict[str, Any]) -> dict[str, float | None]:
    cost, tokens = row["cost"], row["prompt_tokens"] + row["completion_tokens"]
    return {
        "cost_per_request": None if cost is None else cost / row["requests"],
        "cost_per_million_tokens": None if cost is None or not tokens else cost * 1e6 / tokens,
    }


def _time(at_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at_us)
