"""`pdserve status`"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_REFRESH_S = 1.0
_EPOCH_SHOWN = 6
_ESTIMATES = (
    "What an engine's step takes, and what it takes longer for 1,000 prompt tokens, 1,000² pairs "
    "of them with earlier ones, an answer, 1,000 tokens of an answer's context. A hand-over: what "
    "it takes, and longer for 1,000 tokens. ?: a guess until it is learnt"
)
_STATE_STYLE = {"ready": "green", "proven": "green", "lost": "red", "refused": "red"}


def status(
    url: Url = DEFAULT_URL,
    key: Key = None,
    once: Annotated[bool, typer.Option("--once", help="Prints it once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The fleet as JSON, once.")] = False,
) -> None:
    """Shows workers, routes and load, live."""
    import time

    from cli.http import connect, get_json

    with connect(url, key) as client:
        fleet = get_json(client, "/fleet")
        if as_json:
            print(json.dumps(fleet, indent=2))
            return
        from rich.live import Live

        from cli.console import console

        out = console()
        if once or not sys.stdout.isatty():
            out.print(picture(fleet))
            return
        with Live(picture(fleet), console=out, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(_REFRESH_S)
                live.update(picture(get_json(client, "/fleet")), refresh=True)


def picture(fleet: dict[str, Any]) -> Group:
    """The fleet as tables."""
    from rich.console import Group
    from rich.text import Text

    ready = Text("ready", "bold green") if fleet["ready"] else Text("not ready", "bold yellow")
    tables = (_workers, _leases, _routes, _queues, _pairs, _estimates)
    return Group(ready, *(table(fleet) for table in tables))


def _workers(fleet: dict[str, Any]) -> Table:
    table = _table("worker", "roles", "duty", "state", "epoch")
    for name in ("run", "wait", "KV", "reserved"):
        table.add_column(name, justify="right")
    for worker in fleet["workers"]:
        table.add_row(
            worker["id"] or "?",
            ", ".join(worker["roles"]),
            worker["duty"],
            _state(worker["state"], worker["detail"]),
            worker["epoch"][:_EPOCH_SHOWN],
            str(worker["running"]),
            str(worker["waiting"]),
            f"{worker['kv_usage']:.0%}",
            str(worker["reserved_tokens"]),
        )
    return table


def _leases(fleet: dict[str, Any]) -> Table:
    """What prefill workers hold for others."""
    table = _table("prefill")
    for name in ("leases", "tokens held", "oldest"):
        table.add_column(name, justify="right")
    for worker in fleet["workers"]:
        if "prefill" in worker["roles"]:
            table.add_row(
                worker["id"],
                str(worker["open_leases"]),
                str(worker["lease_tokens"]),
                f"{worker['oldest_lease_s']:.1f} s",
            )
    return table


def _routes(fleet: dict[str, Any]) -> Table:
    table = _table("model", "route", "state")
    for model, routes in fleet["routes"].items():
        for at, (route, it) in enumerate(routes.items()):
            state = _state("ready" if it["ready"] else "not ready", it["detail"])
            table.add_row("" if at else model, route, state)
    return table


def _queues(fleet: dict[str, Any]) -> Table:
    """Requests let in, those that wait by priority, and how long the last of them will."""
    table = _table("queue")
    for name in ("running", "unread", "high", "normal", "low", "tokens", "wait"):
        table.add_column(name, justify="right")
    for model, it in fleet["requests"].items():
        waiting = (str(number) for number in it["queued_by_priority"].values())
        table.add_row(
            model,
            str(it["running"]),
            str(it["unread_tokens"]),
            *waiting,
            str(it["queued_tokens"]),
            f"{it['wait_s']:.1f} s",
        )
    return table


def _pairs(fleet: dict[str, Any]) -> Table:
    table = _table("prefill", "decode", "transport", "hand-over")
    for pair in fleet["pairs"]:
        detail = pair["detail"]
        if pair["next_probe_s"] is not None:
            detail = f"probed in {pair['next_probe_s']:.0f} s; {detail}"
        row = pair["prefill"], pair["decode"], pair["transport"] or "-"
        table.add_row(*row, _state(pair["state"], detail))
    return table


def _estimates(fleet: dict[str, Any]) -> Table:
    """What routing believes that the workers take; with a question mark until it is learnt."""
    table = _table("model", "time in ms of")
    for name in ("step", "+1k prompt", "+1k² pairs", "+answer", "+1k context"):
        table.add_column(name, justify="right")
    table.caption = _ESTIMATES
    for model, known in fleet["estimates"].items():
        for at, (pool, it) in enumerate(known["pools"].items()):
            reads, writes = it["reads_learnt"], it["writes_learnt"]
            table.add_row(
                "" if at else model,
                pool,
                _ms(it["step_s"], reads or writes),
                _ms(it["token_s"] * 1e3, reads),
                _ms(it["pair_s"] * 1e6, reads),
                _ms(it["sequence_s"], writes),
                _ms(it["context_s"] * 1e3, writes),
            )
        moved = known["hand_over"]
        row = (
            _ms(moved["base_s"], moved["learnt"]),
            _ms(moved["token_s"] * 1e3, moved["learnt"]),
        )
        table.add_row("", "hand-over", *row)
    return table


def _ms(seconds: float, learnt: bool) -> str:
    ms = seconds * 1000
    words = f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
    return words if learnt else f"{words} ?"


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _state(state: str, detail: str) -> str:
    from rich.markup import escape

    style = _STATE_STYLE.get(state, "yellow")
    return f"[{style}]{state}[/]{detail and f' [dim]{escape(detail)}[/]'}"
