"""What runs first in every process that vLLM starts for a `VllmEngine`.

`register` is the entry point `pdserve` of the group `vllm.general_plugins`: vLLM 0.32 calls
it in the front end, in `VLLM::EngineCore` and in each `VLLM::Worker`.
"""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

from pdserve.process import die_with_parent

ENGINE_MARK = "PDSERVE_ENGINE"
"""Environment variable that `VllmEngine` sets for its engine: a folder of the engine's own."""

FAULTS_FILE = "faults"
"""In that folder: the errors that the engine's processes logged, one a line, oldest first."""

POLL_S = 50e-6
"""Pause between two looks at a queue of vLLM's own: late by as much, twice a step at most."""


def register() -> None:
    """Ties an engine process to its parent, makes its errors readable by the front end, and has
    it wait for its queues asleep.

    Does nothing in processes that no `VllmEngine` started, nor in the front end.
    """
    folder = os.environ.get(ENGINE_MARK)
    parent = multiprocessing.parent_process()
    if folder is None or parent is None or parent.pid is None:
        return
    die_with_parent(parent.pid)
    _poll_asleep()
    # Python's last garbage collection takes seconds over vLLM's heap, and frees what the kernel
    # frees anyway: with it `VllmEngine.close` has to kill.
    atexit.register(gc.freeze)
    logger = logging.getLogger("vllm")
    # First, so that it sees a record before the handler that prints it.
    logger.handlers.insert(0, FaultRecorder(Path(folder) / FAULTS_FILE))
    if not logger.isEnabledFor(logging.DEBUG):
        # What `multiprocessing` calls when a process ends by an exception.
        traceback.print_exc = _print_line


def _poll_asleep() -> None:
    """Takes `sched_yield` out of vLLM's waiting loops (`shm_broadcast`).

    A process alone on its core that yields in a tight loop takes all of it. Under Linux 6.18
    nothing else was given that core for minutes, more than once ("workqueue lockup" in the
    kernel's log), while such a loop ran; that it is the cause is not proven.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    def pause() -> None:
        time.sleep(POLL_S)

    for module in (utils, shm_broadcast):
        if not hasattr(module, "sched_yield"):
            raise RuntimeError(f"{module.__name__} waits in another way; remove this mend")
        module.sched_yield = pause


class FaultRecorder(logging.Handler):
    """Writes each error to a file, in one line, and spares the user its traceback.

    The front end tells the user the first line of the file when the engine cannot start. The
    handlers after this one print tracebacks only when the logger's level is DEBUG.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        line = one_line(error) if error else " ".join(record.getMessage().split())
        # The front end removes the folder when it closes the engine; nobody reads it then.
        if self._path.parent.is_dir():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if error and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            record.msg = f"{record.getMessage()} ({line})"
            record.args = None
            record.exc_info = None


def _print_line(*_: object, **__: object) -> None:
    error = sys.exc_info()[1]
    if error is not None:
        sys.stderr.write(one_line(error) + "\n")


def one_line(error: BaseException) -> str:
    """The type and the message of an error, white space folded."""
    return " ".join(f"{type(error).__name__}: {error}".split())
