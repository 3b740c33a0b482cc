"""`pdserve usage`: moments, tables, CSV."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from cli.failure import CliError
from cli.usage import moment, picture, write_csv
from coordinator.gateway.ledger_store import Sums
from coordinator.gateway.usage import of_groups, of_requests
from tests.unit.test_pricing import charge, record

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
DAY_S = 86_400.0
ROWS = of_groups("tenant", [Sums("acme", 4, 3000, 500, 1000, 0, 1.5, 2.5, 3_000_000, 5_000_000)])


def test_moments() -> None:
    assert moment(None, NOW) is None
    assert moment("24h", NOW) == NOW.timestamp() - DAY_S
    assert moment("7d", NOW) == NOW.timestamp() - 7 * DAY_S
    assert moment("90s", NOW) == NOW.timestamp() - 90
    assert moment("2026-11-30", NOW) == NOW.timestamp() - DAY_S / 2
    assert moment("2026-11-30T13:00+01:00", NOW) == NOW.timestamp()
    for text in ("yesterday", "5w", ""):
        with pytest.raises(CliError, match="is no moment"):
            moment(text, NOW)


def shown(by: str, rows: list[dict[str, object]]) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(picture({"by": by, "currency": "EUR", "rows": rows}))
    return capture.get()


def test_the_table_tells_what_a_group_used_and_cost() -> None:
    text = shown("tenant", ROWS)
    for word in ("acme", "3,000", "500", "1,000", "decode EUR", "0.003", "0.005", "0.002", "2"):
        assert word in text, word


def test_single_requests_are_shown_by_their_id() -> None:
    text = shown("request", of_requests([charge(record())]))
    assert "r1" in text
    assert "disaggregated" in text


def test_csv_has_a_line_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(ROWS, tmp_path / "usage.csv")
    head, line = (tmp_path / "usage.csv").read_text().splitlines()
    row = dict(zip(head.split(","), line.split(","), strict=True))
    assert (row["tenant"], row["requests"], row["cost"]) == ("acme", "4", "0.008")
    assert (row["prefill_gpu_s"], row["cost_per_million_tokens"]) == ("1.5", "2.0")
    write_csv(ROWS, Path("-"))
    assert capsys.readouterr().out.splitlines() == [head, line]
    with pytest.raises(CliError, match="No such file"):
        write_csv(ROWS, tmp_path / "nowhere" / "usage.csv")
