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
from typing import TypeVar

from pdserve.engine.kv.blocks import Wait
from pdserve.errors import ErrorReason, PrefillError
from pdserve.types import LeaseEnd

UNSEEN_S = 5.0
"""How long a reader waits for a transfer that the engine has not heard of yet."""
LEAVE_S = 1.0
"""How long a reader whose hold has ended is given to take what is being sent to it."""
REMEMBERED = 4096
"""Holds that have ended and whose end is remembered."""
_T = TypeVar("_T")

_REFUSALS = {
    LeaseEnd.FETCHED: (ErrorReason.KV_REUSED, "the KV blocks were fetched before"),
    LeaseEnd.ABANDONED: (ErrorReason.KV_REUSED, "the KV blocks were fetched before, in part"),
    LeaseEnd.RELEASED: (ErrorReason.KV_EXPIRED, "the lease on the KV blocks was ended"),
    LeaseEnd.EXPIRED: (ErrorReason.KV_EXPIRED, "the lease on the KV blocks is over"),
    LeaseEnd.LOST: (ErrorReason.KV_TRANSFER_FAILED, "the prompt was not read to its end"),
}


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
        self._cancel: Callable[[], object] | None = None
        self._end: LeaseEnd | None = None
        self._changed = threading.Condition()

    @property
    def end(self) -> LeaseEnd | None:
        return self._end

    # The engine's thread.

    def extend(self, blocks: list[int], readable: int, written: Wait) -> None:
        """Blocks of which the first `readable` in all hold what they should after `written`."""
        with self._changed:
            self._blocks += blocks
            self._readable = readable
            self._written = written
            self._changed.notify_all()

    def rewind(self) -> None:
        """The engine takes its blocks back and will read the prompt anew, into others: what a
        reader has stays true, and for the rest it waits. Waits for a copy under way."""
        with self._changed:
            self._blocks = []
            self._readable = 0

    def finish(self, end: LeaseEnd) -> None:
        """From here on nothing is copied; waits for a copy that is under way."""
        with self._changed:
            first, self._end = self._end is None, self._end or end
            self._changed.notify_all()
        if first and self._cancel is not None:
            # A reader that has stopped would keep its thread in the middle of a message.
            timer = threading.Timer(LEAVE_S, self._turn_out)
            timer.daemon = True
            timer.start()

    # A reader's thread. `take` and `copy` raise PrefillError once the hold has ended.

    def take(self, cancel: Callable[[], object]) -> None:
        """There is one reader: raises PrefillError KV_REUSED for a second.

        `cancel` ends the reader's call, if the hold ends and the reader does not `leave`.
        """
        with self._changed:
            self._require_open()
            if self._taken:
                raise PrefillError(*_REFUSALS[LeaseEnd.FETCHED])
            self._taken = True
            self._cancel = cancel

    def leave(self, end: LeaseEnd) -> None:
        """The reader goes; ends the hold."""
        with self._changed:
            self._cancel = None
        self.finish(end)

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

    def copy(
        self, first: int, last: int, alive: Callable[[], bool], copy: Callable[[list[int]], _T]
    ) -> _T | None:
        """Calls `copy` with the numbers of these blocks while they are sure to be held, and to
        hold what they should; None for a reader that is not `alive` any more."""
        while self.wait(last - 1, alive) >= last:
            with self._changed:
                self._require_open()
                if self._readable >= last:
                    return copy(self._blocks[first:last])
        return None

    def _turn_out(self) -> None:
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def _require_open(self) -> None:
        if self._end is not None:
            raise PrefillError(*_REFUSALS[self._end])


class HoldTable:
    """The holds of one worker by transfer id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holds: dict[str, Hold] = {}
        self._expiries: dict[str, float] = {}
        self._ended: OrderedDict[str, LeaseEnd] = OrderedDict()
        self._changed = threading.Condition()

    def open(self, hold: Hold) -> None:
        with self._changed:
            self._holds[hold.transfer_id] = hold
            self._changed.notify_all()

    def get(self, transfer_id: str) -> Hold | None:
        return self._holds.get(transfer_id)

    def expire_at(self, transfer_id: str, lease_s: float) -> None:
        """The prompt is read: its blocks are held so long from now."""
        if transfer_id in self._holds:
            self._expiries[transfer_id] = self._clock() + lease_s

    def close(self, transfer_id: str, end: LeaseEnd) -> None:
        """Idempotent."""
        hold = self._holds.get(transfer_id)
        if hold is None:
            return
        hold.finish(end)
        assert hold.end is not None
        with self._changed:
            del self._holds[transfer_id]
            self._expiries.pop(transfer_id, None)
            self._ended[transfer_id] = hold.end
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def sweep(self) -> dict[str, LeaseEnd]:
        """Closes prompts that are read and whose hold is over; how each ended."""
        now = self._clock()
        over: dict[str, LeaseEnd] = {}
        for transfer_id, expiry in self._expiries.items():
            end = self._holds[transfer_id].end
            if end is not None:
                over[transfer_id] = end
            elif expiry <= now:
                over[transfer_id] = LeaseEnd.EXPIRED
        for transfer_id, end in over.items():
            self.close(transfer_id, end)
        return over

    def find(self, transfer_id: str, alive: Callable[[], bool]) -> Hold:
        """For a reader, who may come before the engine has heard of the prompt.

        Raises PrefillError: KV_FOREIGN for an id that was never given out (or so long ago that
        it is forgotten), or what became of the hold.
        """
        deadline = time.monotonic() + UNSEEN_S
        with self._changed:
            while (hold := self._holds.get(transfer_id)) is None and alive():
                left = deadline - time.monotonic()
                if left <= 0 or transfer_id in self._ended:
                    break
                self._changed.wait(left)
            end = self._ended.get(transfer_id)
        if hold is not None:
            return hold
        if end is not None:
            raise PrefillError(*_REFUSALS[end])
        raise PrefillError(ErrorReason.KV_FOREIGN, "the prefill engine never held such KV blocks")
