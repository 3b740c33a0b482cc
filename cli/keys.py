"""`pdserve keys new`"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(help="API keys.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `new` a word of its own: typer merges a lone command with its group."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Who the key belongs to.")],
    admin: Annotated[bool, typer.Option("--admin", help="May see the whole fleet.")] = False,
    rate: Annotated[
        str | None, typer.Option(help="Requests allowed, for example '600/minute'.")
    ] = None,
    weight: Annotated[
        float, typer.Option(help="The tenant's part beside others where requests wait.")
    ] = 1.0,
    max_priority: Annotated[
        Literal["high", "normal", "low"], typer.Option(help="What its requests may claim at most.")
    ] = "normal",
    file: Annotated[Path, typer.Option(help="The keys file; made if missing.")] = Path("keys.yaml"),
) -> None:
    """Makes a key, adds its hash to the keys file, and prints the key: it is shown only once."""
    from pydantic import ValidationError

    from cli.failure import CliError
    from coordinator.gateway.keys import new_key
    from coordinator.policy.ticket import Priority
    from pdserve.section import in_words

    try:
        plain, entry = new_key(
            tenant, admin=admin, rate=rate, weight=weight, max_priority=Priority(max_priority)
        )
    except ValidationError as error:
        raise CliError(f"the key cannot be made so: {in_words(error)}") from None
    try:
        with _locked(file):
            _append(file, entry.model_dump(mode="json", exclude_none=True))
    except OSError as error:
        raise CliError(f"keys file {file}: {error.strerror}") from None
    print(plain)
    print(
        f"key {entry.id} of {tenant} added to {file}; the key is not shown again", file=sys.stderr
    )


def _append(file: Path, entry: dict[str, Any]) -> None:
    """Replaces the file by one with `entry` at its end, readable by its owner alone."""
    import yaml

    from coordinator.gateway.keys import KeyRing

    entries = []
    if file.exists():
        KeyRing.load(file)  # a file that the coordinator would refuse is not touched
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))["keys"]
    # mkstemp makes it 0600, in the same folder so that the replacement is atomic.
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            yaml.safe_dump({"keys": [*entries, entry]}, out, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Two keys made at the same time must both be in the file."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
