"""Where tables go: a terminal as wide as it is, a pipe or a file as wide as tables need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 120


def console() -> Console:
    """Of standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH)
