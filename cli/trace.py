"""`pdserve trace`"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_WIDTH = 80
_STYLES = {
    "prefill": "blue",
    "transfer": "magenta",
    "first_step": "green",
    "decode": "green",
    "failed_attempts": "red",
    "recovery": "red",
}


def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Its x-request-id, its trace id, or how one begins.")
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="The timeline as JSON.")] = False,
) -> None:
    """Shows where the time of one request went."""
    from cli.http import connect, get_json, part

    with connect(url, key) as client:
        timeline = get_json(client, f"/fleet/requests/{part(request_id)}")
    if as_json:
        print(json.dumps(timeline, indent=2))
        return
    from cli.console import console

    console().print(picture(timeline))


def picture(timeline: dict[str, Any]) -> Group:
    """One request as a waterfall."""
    from rich.console import Group

    return Group(_facts(timeline), _waterfall(timeline))


def _facts(timeline: dict[str, Any]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    workers = [name for name in (timeline["prefill_worker"], timeline["decode_worker"]) if name]
    outcome = timeline["outcome"]
    error = timeline["error"]
    facts = {
        "request": timeline["request_id"],
        "trace": timeline["trace_id"],
        "outcome": outcome if error is None else f"{outcome}: {error}",
        "model": timeline["model"],
        "route": timeline["reason"],
        "arm": timeline["arm"],
        "workers": " → ".join(workers),
        "fallbacks": ", ".join(timeline["fallbacks"]),
        "recoveries": ", ".join(timeline["recoveries"]),
        "tokens": _tokens(timeline),
        "first token": None if timeline["ttft_s"] is None else _time(timeline["ttft_s"]),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value:
            grid.add_row(f"[dim]{name}[/]", escape(value))
    return grid


def _tokens(timeline: dict[str, Any]) -> str:
    words = f"{timeline['prompt_tokens']} prompt"
    if timeline["completion_tokens"] is not None:
        words += f" ({timeline['cached_tokens']} cached), {timeline['completion_tokens']} answer"
    return words


def _waterfall(timeline: dict[str, Any]) -> Table:
    from rich.bar import Bar
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    total = timeline["duration_s"]
    table = Table(box=SIMPLE_HEAD, show_footer=True, width=_WIDTH)
    table.add_column("phase", "total", no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("took", _time(total), justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    at = 0.0
    for phase, spent in timeline["segments"]:
        bar = Bar(total, at, at + spent, color=_STYLES.get(phase, "yellow"))
        table.add_row(phase.replace("_", " "), _time(at), _time(spent), bar)
        at += spent
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
