"""Lines that outlive the process which wrote them, until somebody has put them elsewhere.

A line is in the kernel's hands when `append` returns: a process that is killed then loses
nothing, a machine that loses power may lose the lines that were not taken yet.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pdserve.errors import ConfigError

_SUFFIX = ".jsonl"


class Journal:
    """Files in a folder, the newest of which is written. One process has it at a time."""

    def __init__(self, folder: Path) -> None:
        """Takes up what is there. Raises ConfigError where the folder cannot be had."""
        self._folder = folder
        try:
            for each in (folder.parent, folder):  # who uses what is its owner's to know
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"ledger.folder: {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"ledger.folder: another coordinator uses {folder.parent}: give each its own"
            ) from None
        self._closed = sorted(folder.glob(f"*{_SUFFIX}"))
        self._number = int(self._closed[-1].stem) if self._closed else 0
        self._open: int | None = None

    def append(self, line: bytes) -> None:
        """Raises OSError where it cannot be written: the line is then lost."""
        if self._open is None:
            self._number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._open = os.open(self._path(self._number), flags, 0o600)
        if (written := os.write(self._open, line)) < len(line):
            os.ftruncate(self._open, os.fstat(self._open).st_size - written)
            raise OSError("the disk is full")

    def take(self) -> list[Path]:
        """All files, to which nothing is added any more, oldest first; whoever has put their
        lines elsewhere calls `done`."""
        if self._open is not None:
            os.close(self._open)
            self._open = None
            self._closed.append(self._path(self._number))
        return list(self._closed)

    def done(self, file: Path) -> None:
        """Its lines are elsewhere."""
        file.unlink()
        self._closed.remove(file)

    def close(self) -> None:
        """What was not taken stays for the next one."""
        if self._open is not None:
            os.close(self._open)
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{_SUFFIX}"
