"""`pdserve bench`"""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import console
from cli.failure import CliError
from cli.options import DEFAULT_URL, ITL_P99, TTFT_P99, URL_VARIABLE, ItlP99, Key, TtftP99

if TYPE_CHECKING:
    from measure.bench.arrivals import Arrivals
    from measure.bench.document import Document
    from measure.bench.drive import Target

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="NAME=URL",
        help=f"Several take turns; default: the coordinator at {URL_VARIABLE}, or on this machine.",
    ),
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header", metavar="NAME=HEADER:VALUE", help="A header of every request to a target."
    ),
]
Traffic = Annotated[
    str, typer.Option(metavar="poisson|bursty|FILE", help="How requests come; or a trace.")
]
Lengths = Annotated[str, typer.Option(metavar="FROM-TO", help="In tokens; not of a trace.")]
Seconds = Annotated[float, typer.Option(min=1, help="Of each run, warm-up included.")]
WarmUp = Annotated[float, typer.Option(min=0, help="Seconds that count for nothing.")]
Seed = Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each target at the asked rate.")]
Saturate = Annotated[
    bool, typer.Option("--saturate", help="Looks for the highest rate within the SLO, too.")
]
Output = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures.")]
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="A page with plots; needs matplotlib."),
]


def bench(  # noqa: PLR0913  (one option each)
    *,
    target: Targets = None,
    header: Headers = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that is served.")] = None,
    key: Key = None,
    traffic: Traffic = "poisson",
    rate: Annotated[str, typer.Option(metavar="N/UNIT", help="Like 2/s or 50/min.")] = "1/s",
    prompt_tokens: Lengths = "50-200",
    answer_tokens: Lengths = "20-100",
    seconds: Seconds = 60.0,
    warm_up: WarmUp = 5.0,
    rounds: Rounds = 1,
    seed: Seed = 0,
    ttft_p99: TtftP99 = TTFT_P99,
    itl_p99: ItlP99 = ITL_P99,
    saturate: Saturate = False,
    output: Output = None,
    page: Page = None,
) -> None:
    """Open-loop load on any OpenAI-compatible server: latencies, goodput, saturation."""
    from rich.console import Console

    from cli import quantities
    from cli.bench_progress import Shown
    from cli.bench_table import picture
    from measure import machine
    from measure.bench.document import SCHEMA, Document, Target
    from measure.bench.targets import Load, measure
    from measure.plan.slo import Slo
    from measure.processes import BenchError

    if page is not None:
        _need_matplotlib()
    targets = _targets(target or [_ours()], header or [], model, key)
    slo = Slo(quantities.duration(ttft_p99), quantities.duration(itl_p99))
    arrivals = _arrivals(traffic, prompt_tokens, answer_tokens)
    load = Load(arrivals, quantities.rate(rate), seconds, warm_up, slo, seed)
    try:
        with Shown(Console(stderr=True)) as shown:
            found = measure(targets, load, rounds, saturate=saturate, watch=shown)
    except BenchError as error:
        raise CliError(str(error)) from None
    document = Document(
        SCHEMA,
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine.describe(("httpx",)),
        shlex.join(("pdserve", *sys.argv[1:])),
        traffic,
        slo,
        warm_up,
        [
            Target(
                it.target.name, it.target.url, it.target.model, it.runs, it.search, it.saturation
            )
            for it in found
        ],
    )
    console().print(picture(document.targets))
    _write(document, output, page)


def _ours() -> str:
    return f"pdserve={os.environ.get(URL_VARIABLE, DEFAULT_URL)}"


def _need_matplotlib() -> None:
    """Before minutes of measuring. Raises CliError."""
    if find_spec("matplotlib") is None:
        raise CliError("--html needs matplotlib: `make install` in pdserve's folder brings it")


def _write(document: Document, output: Path | None, page: Path | None) -> None:
    """Raises CliError."""
    from measure.bench.document import encode

    file = output
    try:
        if output is not None:
            output.write_bytes(encode(document))
        if page is not None:
            from measure.bench.page import render

            file = page
            page.write_text(render(document), encoding="utf-8")
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low):
        return int(low), int(high or low)
    raise CliError(f"{text!r} is no range of tokens, like 50-200")


def _arrivals(traffic: str, prompt_tokens: str, answer_tokens: str) -> Arrivals:
    from cli.traffic import arrivals
    from measure.bench.arrivals import BURSTINESS, gamma, replayed

    prompt, answer = _lengths(prompt_tokens), _lengths(answer_tokens)
    if traffic == "poisson":
        return gamma(1.0, prompt, answer)
    if traffic == "bursty":
        return gamma(BURSTINESS, prompt, answer)
    coming = arrivals(traffic, 3_600.0, 1.0, 1)
    if len(coming) < 2 or not coming[-1].at_s:
        raise CliError(f"{traffic} is too short")
    return replayed(coming)


def _targets(
    named: list[str], headers: list[str], model: str | None, key: str | None
) -> list[Target]:
    """Asks each server for its model, where none is given. Raises CliError."""
    from cli.http import connect, get_json
    from measure.bench.drive import Target

    found: dict[str, Target] = {}
    for text in named:
        name, _, url = text.partition("=")
        if not name or not url.startswith("http"):
            raise CliError(f"--target {text}: NAME=URL is wanted")
        url = url.removesuffix("/").removesuffix("/v1")
        serves = model
        if serves is None:
            with connect(url, key) as client:
                serves = get_json(client, "/v1/models")["data"][0]["id"]
        given = {"authorization": f"Bearer {key}"} if key else {}
        found[name] = Target(name, url, serves, given)
    for text in headers:
        name, _, rest = text.partition("=")
        field, _, value = rest.partition(":")
        if name not in found or not field or not value:
            raise CliError(f"--header {text}: NAME=HEADER:VALUE of a target is wanted")
        found[name].headers[field] = value.strip()
    return list(found.values())
