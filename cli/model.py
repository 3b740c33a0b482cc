"""`pdserve model fetch`"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cli.options import Parent

app = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `fetch` a word of its own: typer merges a lone command with its group."""


@app.command()
def fetch(
    name: Annotated[str | None, typer.Argument(help="By default, the default model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines.")] = False,
    parent: Parent = None,
) -> None:
    """Downloads and converts a model once, and prints the folder that it lies in."""
    from pdserve.models import DEFAULT_MODEL, resolve
    from pdserve.process import die_with_parent

    if parent is not None:
        die_with_parent(parent)
    if as_json:
        folder = resolve(name or DEFAULT_MODEL, lambda text: _event("progress", detail=text))
        _event("ready", folder=str(folder))
        return
    # A download shows its own progress nowhere else than here; the folder alone goes to stdout.
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("looking for the model") as spinner:

        def progress(text: str) -> None:
            if console.is_terminal:
                spinner.update(text)
            else:
                print(text, file=sys.stderr, flush=True)

        folder = resolve(name or DEFAULT_MODEL, progress)
    print(folder)


def _event(event: str, **fields: str) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)
