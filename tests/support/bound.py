"""Runs a module for as long as the process lives that started it, however that one ends.

`python -m tests.support.bound PARENT_PID MODULE [ARGUMENT ...]`
"""

from __future__ import annotations

import runpy
import sys

from pdserve.process import die_with_parent

if __name__ == "__main__":
    _, parent_pid, module, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
