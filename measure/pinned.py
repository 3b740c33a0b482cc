"""Becomes another program, on one core or on all, which dies with its parent.

`python -m measure.pinned CORE|all PARENT_PID PROGRAM ARGUMENT...`
"""

from __future__ import annotations

import os
import sys

from pdserve.process import die_with_parent

if __name__ == "__main__":
    core, parent_pid, *program = sys.argv[1:]
    if core != "all":
        os.sched_setaffinity(0, {int(core)})
    die_with_parent(int(parent_pid))
    os.execvp(program[0], program)  # noqa: S606 - there is no shell to avoid
