"""`python -m measure.ab`: how often verdicts are false, and how soon differences are found."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from measure.ab.synthetic import (
    Made,
    Outcome,
    decided_by_blocks,
    decided_by_peeking,
    decided_by_requests,
    play,
)
from measure.page import Section, table
from pdserve.ab.evidence import Array
from pdserve.ab.report import ALPHA

SECTION = Section("verdicts on made-up experiments", "python -m measure.ab --write docs/ab.md")

_DESIGNS = (
    ("interleaved", Made(0, 100, load=0.8)),
    ("interleaved, nearly full", Made(0, 100, load=0.9)),
    ("sticky", Made(0, 100, load=0.9, together=True)),
)
_WAYS: tuple[tuple[str, Callable[[Outcome], Array]], ...] = (
    ("pdserve's, by blocks", lambda outcome: decided_by_blocks(outcome, ALPHA)),
    ("one look's interval, by blocks", decided_by_peeking),
    ("always valid, by requests", lambda outcome: decided_by_requests(outcome, ALPHA)),
)


def main() -> None:
    asked = _arguments()
    command = shlex.join(("python", "-m", "measure.ab", *sys.argv[1:]))
    text = SECTION.render(_parts(asked.runs, asked.seed, command))
    print(text)
    if asked.write is not None:
        asked.write.write_text(SECTION.replace(asked.write.read_text(), text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m measure.ab", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="experiments a cell")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    return parser.parse_args()


def _parts(runs: int, seed: int, command: str) -> list[str]:
    made = _DESIGNS[0][1]
    header = ("design", "B is worse by", *(name for name, _ in _WAYS), "median blocks, pdserve's")
    rows = [
        _row(name, replace(design, runs=runs, worse=worse), seed)
        for name, design in _DESIGNS
        for worse in (0.0, 0.05, 0.1, 0.2)
    ]
    return [
        f"Made by `{command}`: experiments that came to a verdict, of {runs} each, looked at after "
        f"each of {made.blocks} blocks. Where B is not worse, each verdict is a false one. Of a "
        "queue with exponential service, 80 % busy (nearly full and sticky: 90 %), with "
        f"{made.per_slot} requests a slot, good within {made.target:g} mean service times; B loses "
        "a part of its good answers.",
        table(header, rows),
    ]


def _row(name: str, made: Made, seed: int) -> tuple[str, ...]:
    outcome = play(made, seed)
    found = [way(outcome) for _, way in _WAYS]
    decided = [f"{np.isfinite(one).mean():.1%}" for one in found]
    middle = np.sort(found[0])[made.runs // 2]
    blocks = f"{middle:.0f}" if np.isfinite(middle) and made.worse else "-"
    return (name, f"{made.worse:.0%}", *decided, blocks)


if __name__ == "__main__":
    main()
