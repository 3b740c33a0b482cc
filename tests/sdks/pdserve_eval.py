"""`pdserve eval` with one of lm-eval's tasks, by the lm-eval of this environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ASKED = json.loads(sys.argv[1])
LM_EVAL = Path(__file__).parents[2] / ".sdks" / "bin"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        flags = {
            "--tasks": "tasks",
            "--url": ASKED["base_url"],
            "--model": ASKED["model"],
            "--modes": ASKED["mode"],
            "--out": str(out),
        }
        command = (sys.executable, "-m", "cli.main", "eval", "lm-eval:pdserve_write")
        subprocess.run(
            (*command, *(word for flag in flags.items() for word in flag)),
            env={**os.environ, "PATH": f"{LM_EVAL}{os.pathsep}{os.environ['PATH']}"},
            stdout=sys.stderr,
            check=True,
        )
        (run,) = json.loads(out.read_bytes())["runs"]
    answers = [(one["id"], one["correct"], one["text"]) for one in run["answers"]]
    right = sum(correct for _, correct, _ in answers)
    figures = f", {right} of {len(answers)} right"
    print(json.dumps({"answers": answers, "versions": "pdserve eval", "figures": figures}))


main()
