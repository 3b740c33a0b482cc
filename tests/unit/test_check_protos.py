"""`scripts/check-protos` lets no change through that breaks a client or leaves something stale."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("protos", "pdserve/v1", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def check(copy: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [copy / "scripts" / "check-protos"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(copy), "VENV": sys.prefix},
        capture_output=True,
        text=True,
        check=False,
    )


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_the_contract_as_it_is_passes(copy: Path) -> None:
    ended = check(copy)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  string cache_salt = 3;\n", "", "would break"),
        ("string cache_salt = 3;", "string cache_salt = 9;", "would break"),
        ("string cache_salt = 3;", "string salt = 3;", "would break"),
        (
            "string cache_salt = 3;",
            "string cache_salt = 3;\n  // New.\n  bool x = 99;",
            "make proto",
        ),
        ("string cache_salt = 3;", "string cacheSalt = 3;", ""),
    ],
    ids=["removed", "renumbered", "renamed", "added without new stubs", "badly named"],
)
def test_a_change_is_noticed(copy: Path, old: str, new: str, complaint: str) -> None:
    edit(copy / "protos/pdserve/v1/inference.proto", old, new)
    ended = check(copy)
    assert ended.returncode != 0
    assert complaint in ended.stderr


def test_a_baseline_that_lacks_what_was_added_is_noticed(copy: Path) -> None:
    edit(
        copy / "protos/pdserve/v1/inference.proto",
        "string cache_salt = 3;",
        "string cache_salt = 3;\n  // New.\n  bool added = 99;",
    )
    subprocess.run(
        [copy / "scripts" / "protos"],
        env={"PATH": "/usr/bin:/bin", "VENV": sys.prefix},
        capture_output=True,
        check=True,
    )
    ended = check(copy)
    assert ended.returncode != 0
    assert "lacks what was added" in ended.stderr
