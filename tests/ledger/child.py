"""The coordinator as the kill suite runs it: whole, in a process that was forked with all of its
modules loaded, since to load them takes most of a start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from cli.parsers import chat_parser
from coordinator.main import run_coordinator
from pdserve.config import load


def coordinator(config: dict[str, Any], told: Path) -> None:
    """Until it is killed; `told` gets what it prints."""
    out = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(out, stream.fileno())
    uvloop.run(run_coordinator(load(None, config), chat_parser))
