"""The generated part of a page: Markdown between two markers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measure.stats import repeated

Header = tuple[str, ...]
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A generated part, by name, and the command that writes it."""

    name: str
    command: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: begin, written by `{self.command}` -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}: end -->"

    def render(self, parts: Sequence[str]) -> str:
        """Paragraphs, tables and headings, between the markers."""
        return "\n\n".join((self.begin, *parts, self.end)) + "\n"

    def replace(self, page: str, generated: str) -> str:
        """The page with its generated part renewed, or added at its end where it has none yet.

        Raises ValueError where only one of the two markers is there.
        """
        if self.begin not in page and self.end not in page:
            return f"{page.rstrip()}\n\n{generated}".lstrip()
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(
                f"the page has only one of {self.begin!r} and {self.end!r}, or they are swapped"
            )
        return before + generated.rstrip("\n") + after


def cell(values: Sequence[float], digits: int, unit: str = "") -> str:
    """The median, and the lowest and the highest where there are several."""
    figure = repeated(values)
    text = f"{figure.median:,.{digits}f}{unit}"
    if len(values) == 1:
        return text
    return f"{text} ({figure.lowest:,.{digits}f} to {figure.highest:,.{digits}f})"


def table(header: Header, rows: Sequence[Row]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
