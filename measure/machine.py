"""What the figures were measured on, and with."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def describe(packages: Sequence[str]) -> str:
    """One line, with the versions of these packages."""
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {_cpu_model()}, {cores} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu_model() -> str:
    return model_name(Path("/proc/cpuinfo").read_text().splitlines())


def model_name(cpuinfo: Sequence[str]) -> str:
    for line in cpuinfo:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
