"""Programs that no wheel carries, as scripts/tools has put them there."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".tools"


def tool(name: str) -> Path:
    path = FOLDER / name
    assert path.is_file(), f"{path} is missing: scripts/tools makes it (make test does that, too)"
    return path
