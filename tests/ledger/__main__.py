"""`python -m tests.ledger --kills 100`: the kill suite, at length; exit status 1 for a fault."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from tests.ledger.run import Killing
from tests.support.postgres import postgres


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills coordinators and audits their ledger.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL, not on SQLite")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began = time.monotonic()
    with ExitStack() as stack:
        url = stack.enter_context(postgres()).fresh_url() if asked.postgres else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-ledger-")))
        audit = asyncio.run(Killing(folder, url, asked.seed).run(asked.kills))
    print(
        f"{audit.kills} kills in {time.monotonic() - began:.0f} s: {audit.asked} requests asked, "
        f"{len(audit.told)} answers read to their end, {len(audit.posted)} charges; "
        f"{len(audit.settled)} seen settled after a kill, {audit.left_to_post} of them left for "
        f"the next coordinator to post"
    )
    for fault in audit.faults:
        print(f"FAULT: {fault}")
    return 1 if audit.faults else 0


if __name__ == "__main__":
    sys.exit(main())
