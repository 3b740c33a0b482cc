"""`python -m measure.plan FOLDER`: how near a plan comes to the simulation of the same fleets."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from measure.plan.simulated import SECTION, render


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m measure.plan", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the public traces are")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown page whose generated part is renewed"
    )
    asked = parser.parse_args()
    text = render(asked.folder, len(os.sched_getaffinity(0)))
    print(text)
    if asked.write is not None:
        asked.write.write_text(SECTION.replace(asked.write.read_text(), text))


if __name__ == "__main__":
    main()
