"""The blocks that an engine's worker gives out over gRPC. Shared by threads: the engine's own,
which adds blocks as they are computed and takes them back, and one for each reader.

Blocks that the engine takes back may belong to another prompt a moment later. So they are
copied under the hold's lock, and a hold that has ended gives out nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from pdserve.engine.kv.blocks import Wait
from pdserve.errors import ErrorReason, PrefillError

UNSEEN_S = 5.0
"""How long a reader waits for a transfer that the engine has not heard of yet."""
_REMEMBERED = 4096
_T = TypeVar("_T")


class End(Enum):
    """How a hold ended."""

    FETCHED = "fetched"
    RELEASED = "released"
    EXPIRED = "expired"
    ABANDONED = "abandoned"


class Hold:
    """The blocks of one prompt, in the order of its tokens; `num_blocks` there will be."""

    def __init__(self, transfer_id: str, num_tokens: int, num_blocks: int) -> None:
        self.transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self._blocks: list[int] = []
        self._written: Wait | None = None
        self._readable = 0
        self._taken = False
        self._end: End | None = None
        self._changed = threading.Condition()

    @property
    def end(self) -> End | None:
        return self._end

    # The engine's thread.

    def extend(self, blocks: list[int], readable: int, written: Wait) -> None:
        """Blocks of which the first `readable` in all hold what they should after `written`."""
        with self._changed:
            self._blocks += blocks
            self._readable = readable
            self._written = written
            self._changed.notify_all()

    def finish(self, end: End) -> None:
        """From here on nothing is copied; waits for a copy that is under way."""
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()

    # A reader's thread. Each raises PrefillError once the hold has ended.

    def take(self) -> None:
        """There is one reader: raises PrefillError KV_REUSED for a second."""
        with self._changed:
            self._require_open()
            if self._taken:
                raise PrefillError(ErrorReason.KV_REUSED, "the KV blocks were fetched before")
            self._taken = True

    def wait(self, first: int, alive: Callable[[], bool]) -> int:
        """Until block `first` can be read, or the reader is not `alive`; how many can be."""
        with self._changed:
            while self._readable <= first and self._end is None and alive():
                self._changed.wait()
            self._require_open()
            written = self._written
            readable = self._readable
        if written is not None:
            written()
        return readable

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def copy(self, first: int, last: int, copy: Callable[[list[int]], _T]) -> _T:
        """Calls `copy` with the numbers of these blocks while they are sure to be held."""
        with self._changed:
            self._require_open()
            return copy(self._blocks[first:last])

    def _require_open(self) -> None:
        if self._end is not None:
            raise PrefillError(
                ErrorReason.KV_TRANSFER_FAILED, f"the KV blocks were {self._end.value}"
            )


class HoldTable:
    """The holds of one worker by transfer id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holds: dict[str, Hold] = {}
        self._expiries: dict[str, float] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()

    def open(self, hold: Hold) -> None:
        with self._changed:
            self._holds[hold.transfer_id] = hold
            self._ended.pop(hold.transfer_id, None)
            self._changed.notify_all()

    def get(self, transfer_id: str) -> Hold | None:
        return self._holds.get(transfer_id)

    def expire_at(self, transfer_id: str, lease_s: float) -> None:
        """The prompt is read: its blocks are held so long from now."""
        if transfer_id in self._holds:
            self._expiries[transfer_id] = self._clock() + lease_s

    def close(self, transfer_id: str, end: End) -> None:
        """Idempotent."""
        with self._changed:
            hold = self._holds.pop(transfer_id, None)
            self._expiries.pop(transfer_id, None)
            if hold is None:
                return
            self._ended[transfer_id] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        hold.finish(end)

    def sweep(self) -> dict[str, End]:
        """Closes prompts that are read and whose hold is over; how each ended."""
        now = self._clock()
        over: dict[str, End] = {}
        for transfer_id, expiry in self._expiries.items():
            end = self._holds[transfer_id].end
            if end is not None:
                over[transfer_id] = end
            elif expiry <= now:
                over[transfer_id] = End.EXPIRED
        for transfer_id, end in over.items():
            self.close(transfer_id, end)
        return over

    def find(self, transfer_id: str, alive: Callable[[], bool]) -> Hold:
        """For a reader, who may come before the engine has heard of the prompt.

        Raises PrefillError KV_FOREIGN.
        """
        deadline = time.monotonic() + UNSEEN_S
        with self._changed:
            while (hold := self._holds.get(transfer_id)) is None and alive():
                left = deadline - time.monotonic()
                if left <= 0 or transfer_id in self._ended:
                    break
                self._changed.wait(left)
        if hold is None:
            raise PrefillError(ErrorReason.KV_FOREIGN, "the prefill engine holds no such KV blocks")
        return hold
