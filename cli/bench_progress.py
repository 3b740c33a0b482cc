"""How far a load test is, on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_A_SECOND = 4
"""Often enough to look at, and rarely enough to leave the client its time."""


class Shown:
    """What goes on, and how many of its requests have been answered; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=_A_SECOND,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=None)

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begins(self, words: str, requests: int) -> None:
        self._progress.reset(self._bar, total=requests, description=words)

    def answered(self) -> None:
        self._progress.advance(self._bar)
