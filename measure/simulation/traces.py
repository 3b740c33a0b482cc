"""Traffic to be simulated: public traces, pdserve's own access log, and mixes made from a seed.
Pure but for reading files.

Tokens are invented. A Mooncake trace says which 512-token blocks are equal, and equal ones get
equal tokens; the others tell lengths alone, so no two of their prompts share a prefix.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path
from random import Random

_BLOCK = 512
_OWN = 1 << 31
"""Token ids from here on are of no block."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds since the trace began, prompt and answer in tokens.

    `blocks` are ids of the prompt's 512-token blocks, equal where their tokens are, and so are
    all before them; without them the prompt is like no other.
    """

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()


class TraceError(Exception):
    """A file that is no trace; the message says why, in one line."""


def load(path: Path) -> list[Arrival]:
    """An Azure trace (`.csv`), a Mooncake one, or a coordinator's log, in order of arrival.

    Raises TraceError, or OSError.
    """
    read = _azure if path.suffix == ".csv" else _lines
    try:
        arrivals = sorted(read(path), key=lambda arrival: arrival.at_s)
    except KeyError as error:
        raise TraceError(f"{path} is no trace: a request has no {error.args[0]}") from None
    except (ValueError, TypeError, OverflowError, csv.Error) as error:
        raise TraceError(f"{path} is no trace: {error}") from None
    if not arrivals:
        raise TraceError(f"{path} holds no request; a log must be in JSON (log.format)")
    return arrivals


def public(folder: Path, pattern: str) -> list[Arrival]:
    """The first trace by name in a folder whose name matches. Raises OSError or TraceError."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder} holds no {pattern}")
    return load(found[0])


def _lines(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
        read = _mooncake if '"hash_ids"' in first else _access_log
        yield from read(chain((first,), lines))


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        entry = json.loads(line)
        yield Arrival(
            entry["timestamp"] / 1000,
            max(1, int(entry["input_length"])),
            max(1, int(entry["output_length"])),
            tuple(entry["hash_ids"]),
        )


def _access_log(lines: Iterable[str]) -> Iterator[Arrival]:
    """Of requests that were answered: nobody knows how long the other answers would have been.
    A line is written at a request's end; copies for a shadow came from no client."""
    found = []
    for line in lines:
        if '"event": "request"' not in line:
            continue
        entry = json.loads(line)
        if entry["completion_tokens"] is not None and entry["surface"] != "shadow":
            ended_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
            at_s = ended_s - entry["duration_ms"] / 1000
            found.append((at_s, entry["prompt_tokens"], entry["completion_tokens"]))
    began_s = min(found)[0] if found else 0.0
    for at_s, prompt, answer in found:
        yield Arrival(at_s - began_s, max(1, int(prompt)), max(1, int(answer)))


def _azure(path: Path) -> Iterator[Arrival]:
    first: datetime | None = None
    with path.open(encoding="utf-8", newline="") as rows:
        for row in csv.DictReader(rows):
            # Seven digits of a second, of which Python takes six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            yield Arrival(
                (at - first).total_seconds(),
                max(1, int(row["ContextTokens"])),
                max(1, int(row["GeneratedTokens"])),
            )


def bimodal(duration_s: float, rate: float, seed: int) -> list[Arrival]:
    """Chats of 100 to 500 tokens and 100 to 300 back, and one long prompt in ten: 8,000 to
    16,000 tokens, 10 to 50 back. `rate` is in requests a second, Poisson."""

    def lengths(random: Random) -> tuple[int, int]:
        if random.random() < 0.1:
            return random.randint(8_000, 16_000), random.randint(10, 50)
        return random.randint(100, 500), random.randint(100, 300)

    return _poisson(duration_s, rate, seed, lengths)


def short(duration_s: float, rate: float, seed: int) -> list[Arrival]:
    """Chats alone, as in `bimodal`."""
    return _poisson(
        duration_s, rate, seed, lambda random: (random.randint(100, 500), random.randint(100, 300))
    )


Mix = Callable[[float, float, int], list[Arrival]]
MIXES: dict[str, Mix] = {"bimodal": bimodal, "short": short}
"""By name: (duration in seconds, requests a second, seed) to arrivals."""


def _poisson(
    duration_s: float, rate: float, seed: int, lengths: Callable[[Random], tuple[int, int]]
) -> list[Arrival]:
    random = Random(seed)
    arrivals = []
    at_s = random.expovariate(rate)
    while at_s < duration_s:
        arrivals.append(Arrival(at_s, *lengths(random)))
        at_s += random.expovariate(rate)
    return arrivals


def spread(arrivals: list[Arrival], step_s: float) -> list[Arrival]:
    """The same requests, where a trace tells their times in steps of so long: those of one step
    come evenly in it, rather than all at once."""
    steps = groupby(arrivals, key=lambda one: round(one.at_s / step_s))
    return [
        replace(one, at_s=(step + place / len(together)) * step_s)
        for step, group in steps
        for together in (tuple(group),)
        for place, one in enumerate(together)
    ]


def faster(arrivals: list[Arrival], speedup: float) -> list[Arrival]:
    """The same requests, `speedup` times as close together."""
    return [replace(one, at_s=one.at_s / speedup) for one in arrivals]


def token_ids(arrival: Arrival, number: int) -> tuple[int, ...]:
    """The prompt's tokens; `number` is that of the request in its trace.

    The tokens of a block are its id and where in it they stand; whatever no block covers is
    the request's own.
    """
    ids = array("I")
    for place, block in enumerate(arrival.blocks):
        start = block * _BLOCK
        ids.extend(range(start, start + min(_BLOCK, arrival.prompt_tokens - place * _BLOCK)))
    if left := arrival.prompt_tokens - len(ids):
        # The first one is like no other, so no block that starts with it is.
        ids.append(_OWN + number)
        ids.extend(range(1, left))
    return tuple(ids)
