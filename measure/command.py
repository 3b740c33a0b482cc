"""What the commands of all benchmarks have in common: how a run ends, and where its page goes."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markdown import Markdown

from measure import machine
from measure.page import Section
from measure.processes import BenchError

Measured = tuple[Sequence[Any], list[str]]
"""The single outcomes, and what a reader must know of the run."""


def parser(module: str, doc: str | None, repeats: int, repeated: str) -> argparse.ArgumentParser:
    """`repeats` of what is `repeated` are made where nothing else is asked for."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    made.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="every single outcome, as JSON")
    made.add_argument(
        "--repeats", type=int, default=repeats, metavar="N", help=f"runs of each {repeated}"
    )
    return made


def run(
    asked: argparse.Namespace,
    module: str,
    packages: Sequence[str],
    measure: Callable[[Console], Measured],
    render: Callable[..., str],
    section: Section,
) -> None:
    """Measures, shows the tables, and writes them where `asked`; exits with a line where it
    cannot, or is stopped."""
    console = Console(stderr=True)
    name = module.rpartition(".")[2].replace("_", " ")
    try:
        measured, notes = measure(console)
    except BenchError as error:
        sys.exit(f"{name}: {error}")
    except asyncio.CancelledError:
        sys.exit(f"{name}: stopped by a signal; nothing was written")
    command = shlex.join(("python", "-m", module, *sys.argv[1:]))
    text = render(measured, machine.describe(packages), command, notes)
    console.print(Markdown(text))
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.encode(measured))
    if asked.write is not None:
        page = asked.write.read_text() if asked.write.exists() else ""
        asked.write.write_text(section.replace(page, text))


def stop_on_signals() -> None:
    """Cancels the running task on SIGINT and SIGTERM alike: every way to stop a run takes its
    processes with it."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
