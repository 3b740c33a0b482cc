"""Traffic by the name that people give it: a file, or a mix made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cli.failure import CliError

if TYPE_CHECKING:
    from measure.simulation.traces import Arrival


TRAFFIC = "A Mooncake or Azure trace, or a coordinator's log; or bimodal, short."


def arrivals(traffic: str, duration_s: float, rate: float, seed: int) -> list[Arrival]:
    """Duration, rate (a second) and seed are those of a mix. Raises CliError."""
    from measure.simulation.traces import MIXES, TraceError, load

    if traffic in MIXES:
        return MIXES[traffic](duration_s, rate, seed)
    try:
        return load(Path(traffic))
    except TraceError as error:
        raise CliError(str(error)) from None
    except OSError as error:
        raise CliError(f"{traffic}: {error.strerror}") from None
