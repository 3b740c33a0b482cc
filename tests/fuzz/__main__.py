"""`make fuzz`: thousands of new requests. Exit status 1 when a promise is broken."""

from __future__ import annotations

import argparse
import secrets
import sys
import traceback

from pdserve import logs
from pdserve.config import LogConfig
from tests.fuzz.runner import run
from tests.fuzz.system import Tally, running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=6000, help="about so many in all")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of an earlier run")
    asked = parser.parse_args()
    print(f"fuzz: again with --requests {asked.requests} --seed {asked.seed}", flush=True)
    # Errors of the server's own are told there alone.
    logs.configure(LogConfig(level="ERROR"))
    with running() as system:
        try:
            run(system, asked.requests, asked.seed)
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            _print(system.tally)
    return 0


def _print(tally: Tally) -> None:
    for (name, status), count in sorted(tally.answers.items()):
        print(f"{name:32} {status:40} {count:6}")
    print(
        f"fuzz: {tally.total} requests, the slowest took {tally.slowest_s:.2f} s, "
        f"the costliest {tally.costliest_cpu_s:.2f} s of a core"
    )


if __name__ == "__main__":
    sys.exit(main())
