"""The page that `pdserve bench` writes: whole in itself, it asks nobody for anything. Pure."""

from __future__ import annotations

from base64 import b64encode

from jinja2 import Environment, PackageLoader, StrictUndefined

from measure.bench import plots
from measure.bench.document import Document
from measure.bench.figures import milliseconds, rows, warnings


def render(document: Document) -> str:
    """HTML. Targets are named by users: whatever is put in is escaped."""
    pages = Environment(
        loader=PackageLoader("measure.bench", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return pages.get_template("page.html").render(
        document=document,
        coloured=plots.coloured(document.targets),
        rows=rows(document.targets),
        warnings=warnings(document.targets),
        milliseconds=milliseconds,
        plots=_plots(document),
    )


def _plots(document: Document) -> list[tuple[str, str, str]]:
    """Of each its title, what is to be known of it, and itself as a URL of its data."""
    found = [
        (
            "Latencies over time",
            "By when requests were due; a line for each run, dotted the SLO.",
            plots.over_time(document),
        ),
        (
            "Distributions",
            "Of requests, and of gaps between chunks; dotted the SLO and the 99th percentile.",
            plots.distributions(document),
        ),
    ]
    if any(target.saturation for target in document.targets):
        found.append(
            (
                "Saturation",
                "All rates that were tried; dotted the highest within the SLO.",
                plots.saturation(document),
            )
        )
    return [(title, told, _as_url(picture)) for title, told, picture in found]


def _as_url(svg: str) -> str:
    # As an image a picture can neither run anything nor fetch anything.
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
