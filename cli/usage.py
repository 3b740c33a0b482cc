"""`pdserve usage`"""

from __future__ import annotations

import csv
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from rich.table import Table

_AGO = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class By(StrEnum):
    TENANT = "tenant"
    KEY = "key_id"
    MODEL = "model"
    MODE = "mode"
    ARM = "arm"
    SURFACE = "surface"
    OUTCOME = "outcome"
    DAY = "day"
    REQUEST = "request"


_WIDTH = 120
_TO_SECONDS = len("2026-11-30T12:00:00")
_WAIT_S = 70.0
"""For the ledger: what it writes and what it reads may each wait half a minute for its database."""
_NO_PRICE = (
    "-: no price was set. In the configuration's coordinator.models, for example "
    "`prices: {prefill: 4.10, decode: 2.75}`, of an hour of one GPU: docs/cost.md"
)
_FORMULA = ("=", "+", "-", "@")
_TOKENS = {"prompt_tokens": "prompt", "cached_tokens": "cached", "completion_tokens": "answer"}
_Moment = "a date (2026-11-30), a time (2026-11-30T12:00), both UTC, or how long ago: 90s, 24h, 7d"


def usage(  # noqa: PLR0913  (every one is an option)
    *,
    by: Annotated[By, typer.Option(help="What to add up by; request: each by itself.")] = By.TENANT,
    since: Annotated[str | None, typer.Option(help=f"From then on: {_Moment}.")] = None,
    until: Annotated[str | None, typer.Option(help="Before then, likewise.")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="As CSV; - is standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Shows what requests used and cost, from a coordinator's ledger."""
    from cli.http import connect, get_json

    now = datetime.now(UTC)
    bounds = [(name, moment(text, now)) for name, text in (("since", since), ("until", until))]
    query = "".join(f"&{name}={at:f}" for name, at in bounds if at is not None)
    with connect(url, key) as client:
        told = get_json(client, f"/usage?by={by}{query}", _WAIT_S)
    if csv_file is not None:
        write_csv(told["columns"], told["rows"], csv_file)
    if as_json:
        print(json.dumps(told, indent=2))
    elif csv_file is None:
        from rich.console import Console

        # What is too wide for a terminal had better be wrapped than cut.
        Console(width=max(_WIDTH, Console().width)).print(picture(told))


def moment(text: str | None, now: datetime) -> float | None:
    """Seconds since the Unix epoch. Raises CliError."""
    from cli.failure import CliError

    if text is None:
        return None
    try:
        if ago := _AGO.fullmatch(text):
            return (now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})).timestamp()
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):  # nor is one before there were years
        raise CliError(f"{text!r} is no moment: give {_Moment}") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def write_csv(columns: list[str], rows: list[dict[str, Any]], file: Path) -> None:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it: ids come
    from clients. Raises CliError where it cannot be written."""
    from cli.failure import CliError

    lines = [columns, *([_cell(row[name]) for name in columns] for row in rows)]
    if str(file) == "-":
        csv.writer(sys.stdout, lineterminator="\n").writerows(lines)
        return
    try:
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, lineterminator="\n").writerows(lines)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _word(name: str, value: Any) -> str:
    return str(value)[:_TO_SECONDS] if name == "at" else str(value)


def picture(told: dict[str, Any]) -> Table:
    """The rows as a table; money is in the ledger's currency, and "-" what had no price."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    by = told["by"]
    if by == By.REQUEST:
        names = {"at": "at (UTC)", "request_id": "request", "tenant": "tenant", "mode": "mode"}
        counts, costs = _TOKENS, {"cost": told["currency"]}
    else:
        names = {by: by}
        counts = {"requests": "requests", **_TOKENS}
        costs = {
            "prefill_cost": f"prefill {told['currency']}",
            "decode_cost": f"decode {told['currency']}",
            "cost_per_request": "a request",
            "cost_per_million_tokens": "1M tokens",
        }
    table = Table(box=SIMPLE_HEAD, caption_justify="left")
    for title in names.values():
        table.add_column(title)
    for title in (*counts.values(), *costs.values()):
        table.add_column(title, justify="right")
    for row in told["rows"]:
        table.add_row(
            *(escape(_word(name, row[name])) or "-" for name in names),
            *(f"{row[name]:,}" for name in counts),
            *("-" if row[name] is None else f"{row[name]:,.4g}" for name in costs),
        )
    if any(row["cost"] is None for row in told["rows"]):
        table.caption = _NO_PRICE
    return table
