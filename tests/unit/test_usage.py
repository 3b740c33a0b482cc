"""`pdserve usage`: moments, tables, CSV."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from cli.failure import CliError
from cli.usage import moment, picture, write_csv
from coordinator.gateway.ledger_store import Sums
from coordinator.gateway.usage import columns_of_groups, of_groups, of_requests
from tests.unit.test_pricing import charge, record

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
DAY_S = 86_400.0
COLUMNS = columns_of_groups("tenant")
ROWS = of_groups("tenant", [Sums("acme", 4, 3000, 500, 1000, 0, 1.5, 2.5, 3_000_000, 5_000_000)])


def test_moments() -> None:
    assert moment(None, NOW) is None
    assert moment("24h", NOW) == NOW.timestamp() - DAY_S
    assert moment("7d", NOW) == NOW.timestamp() - 7 * DAY_S
    assert moment("90s", NOW) == NOW.timestamp() - 90
    assert moment("2026-11-30", NOW) == NOW.timestamp() - DAY_S / 2
    assert moment("2026-11-30T13:00+01:00", NOW) == NOW.timestamp()
    for text in ("yesterday", "5w", "", "99999999999d", "9999999d"):
        with pytest.raises(CliError, match="is no moment"):
            moment(text, NOW)


def shown(by: str, rows: list[dict[str, object]]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(picture({"by": by, "currency": "EUR", "rows": rows}))
    return capture.get()


def test_the_table_tells_what_a_group_used_and_cost() -> None:
    text = shown("tenant", ROWS)
    for word in ("acme", "3,000", "500", "1,000", "decode EUR", "0.003", "0.005", "0.002", "2"):
        assert word in text, word


def test_what_had_no_price_has_no_cost(tmp_path: Path) -> None:
    (row,) = of_groups("tenant", [Sums("acme", 4, 3000, 500, 1000, 0, 1.5, 2.5, 3_000_000, 0)])
    assert row["prefill_cost"] == 0.003
    unknown = ("decode_cost", "cost", "cost_per_request", "cost_per_million_tokens")
    assert [row[name] for name in unknown] == [None] * 4
    text = shown("tenant", [row])
    assert "prices: {prefill:" in text
    assert text.splitlines()[3].split()[-4:] == ["0.003", "-", "-", "-"]
    assert "prices" not in shown("tenant", ROWS)
    write_csv(COLUMNS, [row], tmp_path / "usage.csv")
    assert (tmp_path / "usage.csv").read_text().endswith("0.003,,,,\n")


def test_what_took_nothing_cost_nothing() -> None:
    (row,) = of_groups("tenant", [Sums("acme", 1, 0, 0, 0, 0, 0.0, 2.0, 0, 4_000_000)])
    assert (row["prefill_cost"], row["cost"], row["cost_per_request"]) == (0.0, 0.004, 0.004)
    assert row["cost_per_million_tokens"] is None, "of no tokens"


def test_names_are_shown_as_they_are() -> None:
    assert "[bold]a[/red]" in shown("tenant", [{**ROWS[0], "tenant": "[bold]a[/red]"}])


def test_single_requests_are_shown_by_their_id() -> None:
    text = shown("request", of_requests([charge(record())]))
    assert "r1" in text
    assert "disaggregated" in text
    assert " 1970-01-01T00:00:00 " in text


def test_csv_has_a_line_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(COLUMNS, ROWS, tmp_path / "usage.csv")
    head, line = (tmp_path / "usage.csv").read_text().splitlines()
    row = dict(zip(head.split(","), line.split(","), strict=True))
    assert (row["tenant"], row["requests"], row["cost"]) == ("acme", "4", "0.008")
    assert (row["prefill_gpu_s"], row["cost_per_million_tokens"]) == ("1.5", "2.0")
    write_csv(COLUMNS, ROWS, Path("-"))
    assert capsys.readouterr().out.splitlines() == [head, line]
    with pytest.raises(CliError, match="No such file"):
        write_csv(COLUMNS, ROWS, tmp_path / "nowhere" / "usage.csv")


def test_csv_of_nothing_still_names_its_columns(tmp_path: Path) -> None:
    write_csv(COLUMNS, [], tmp_path / "usage.csv")
    assert (tmp_path / "usage.csv").read_text() == ",".join(COLUMNS) + "\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is full")
def test_csv_on_a_full_disk_is_refused_in_words() -> None:
    with pytest.raises(CliError, match="No space left"):
        write_csv(COLUMNS, ROWS, Path("/dev/full"))


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_no_spreadsheet_takes_a_name_for_a_formula(name: str, tmp_path: Path) -> None:
    """Numbers are none, also below nothing."""
    write_csv(["name", "cost"], [{"name": name, "cost": -0.5}], tmp_path / "usage.csv")
    with (tmp_path / "usage.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["name", "cost"], [f"'{name}", "-0.5"]]
