"""Another coordinator of the same workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fleet import Fleet


@contextmanager
def second_coordinator(
    fleet: Fleet, transport: str = "auto", workers: tuple[str, ...] = (), **settings: Any
) -> Iterator[Fleet]:
    """Clients of it, once it has handed a prompt over; it ends with the context. `workers` are as
    in its configuration, by default those of the fleet; `settings` are those of its models."""
    env = fleet.system.child("coordinator").environ()
    config = json.loads(env["PDSERVE_COORDINATOR"])
    for surface in ("http", "grpc"):
        config[surface]["port"] = 0
    config["workers"] = workers or config["workers"]
    config["ledger"]["folder"] = None  # that is the other one's
    for model in config["models"]:
        model |= {"transport": transport, **settings}
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "coordinator", "--parent", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PDSERVE_COORDINATOR": json.dumps(config), "PDSERVE_LOG": env["PDSERVE_LOG"]},
    )
    try:
        assert process.stdout is not None
        told: dict[str, str] = {}
        for line in process.stdout:
            event = json.loads(line)
            told |= event if event["event"] == "listening" else {}
            if event["event"] == "ready":
                break
        else:
            raise AssertionError(f"no second coordinator: it ended with {process.wait()}")
        ready = {**told, "model": fleet.model, "metrics": fleet.metrics_addresses}
        with Fleet(fleet.system, ready) as clients:
            yield clients
    finally:
        process.terminate()
        process.communicate(timeout=30)
