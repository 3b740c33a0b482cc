"""Ties the life of a process to that of its parent; imports nothing of pdserve."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process (SIGKILL) when its parent ends, however it ends.

    `parent_pid` is the parent as it was when it started this process: if it is gone
    already, this process ends here. The kernel counts the *thread* that started this process
    as the parent, so a parent must start it from a thread that lives as long as it does.
    Linux only; elsewhere nothing happens. Raises OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The parent may have ended before the call above; then no signal will ever come.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
