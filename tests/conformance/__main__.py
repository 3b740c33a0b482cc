"""`make conformance`: tries every case on every way and writes the table to a document."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve import models
from tests.conformance.compare import compare, expected, fleet, table
from tests.conformance.seen import Verdict

_BEGIN, _END = "<!-- table -->\n", "<!-- /table -->"


def main(document: Path) -> int:
    """1 where a cell differs."""
    references = expected(models.DEFAULT_MODEL)
    with fleet() as running:
        cells = compare(references, running)
    before, _, rest = document.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    document.write_text(f"{before}{_BEGIN}\n{table(cells)}\n\n{_END}{after}")
    return int(Verdict.DIFFERENT in cells.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
