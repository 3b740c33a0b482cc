"""Measurements on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from measure.bench.document import Target


def picture(targets: Sequence[Target]) -> Group:
    """A column for each target."""
    from measure.bench.figures import rows, warnings

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for it in targets:
        table.add_column(Text(it.name), justify="right")
    for name, cells in rows(targets).items():
        table.add_row(name, *cells)
    return Group(table, *(Text(words, "bold yellow") for words in warnings(targets)))
