"""Who may use how much of an engine's KV cache, where it decodes. Pure.

What is charged is in tokens of whole blocks, for an engine gives no smaller part to anybody.

Every sequence is charged its worst case, prompt and longest answer, from the moment it is
promised room until it ends: a promise must hold when the KV arrives, however the others have
grown by then. Two kinds of sequence differ in one point:

- A *reserved* sequence gets room only where it fits beside all that is charged. Its prompt
  is read elsewhere only afterwards, so no prefill is wasted on a full cache, and nothing
  waits here while it holds KV there. Where the engine reads prompts for others too, each of
  these is *held*: charged as a reserved sequence is, for as long as its blocks are there.
- A *colocated* sequence brings no KV along, so it may wait. Where nothing is held it does so
  in the engine: it begins at once, and the charge may exceed the capacity. Where something is,
  it begins when it fits, in order of arrival. Either way no room is promised until that queue
  is gone. It is refused only where it could never fit.

So whatever is held stands beside sequences that all fit, and none of them waits in the engine
for blocks. Else two workers that read prompts for each other could wait in a circle: each for
its own held blocks to go, which the other's sequence is to fetch, queued behind one that waits.

The worst case is pessimistic for answers that end early: a cache can refuse reservations
while its engine still has free blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Room:
    """Charges of sequences by key, in tokens, against the capacity."""

    def __init__(self, capacity_tokens: Callable[[], int]) -> None:
        """`capacity_tokens` is first asked by the first sequence, when the engine has started."""
        self._capacity = capacity_tokens
        self._charges: dict[Hashable, int] = {}
        self._charged = 0
        self._held: set[Hashable] = set()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._waiting_tokens = 0

    @property
    def charged_tokens(self) -> int:
        """Those of waiting sequences included."""
        return self._charged

    @property
    def waiting(self) -> int:
        """Sequences that have not begun for lack of room."""
        return len(self._waiting)

    def reserve(self, key: Hashable, num_tokens: int) -> bool:
        """Promises room; False, and nothing charged, where there is none.

        Raises ValueError for a key that is charged already.
        """
        if key in self._charges:
            raise ValueError("reserved twice")
        if self._waiting or not self._fits(num_tokens):
            return False
        self._charge(key, num_tokens)
        return True

    def hold(self, key: Hashable, num_tokens: int) -> bool:
        """As `reserve`, for a prompt whose blocks are held for others."""
        granted = self.reserve(key, num_tokens)
        if granted:
            self._held.add(key)
        return granted

    def commit(self, key: Hashable, num_tokens: int, begin: Callable[[], None]) -> bool:
        """Charges a sequence, in place of what was reserved for it; once a sequence.

        `begin` is called once it may begin, which for a reserved one is now; never after its
        release. False, and the reservation gone, where it cannot have that much: more than was
        reserved is granted only where it fits, and without a reservation only what could
        ever fit.
        """
        reserved = self._discharge(key)
        if reserved is None:
            granted = num_tokens <= self._capacity()
        else:
            granted = num_tokens <= reserved or self._fits(num_tokens)
        if granted:
            self._charge(key, num_tokens)
            if reserved is None:
                self._waiting[key] = begin
                self._waiting_tokens += num_tokens
            else:
                begin()
        self._begin_waiting()
        return granted

    def release(self, key: Hashable) -> int | None:
        """Ends the charge and returns it; None where there was none."""
        num_tokens = self._discharge(key)
        self._begin_waiting()
        return num_tokens

    def __contains__(self, key: Hashable) -> bool:
        return key in self._charges

    def _fits(self, num_tokens: int) -> bool:
        """Beside all but those that wait."""
        return self._charged - self._waiting_tokens + num_tokens <= self._capacity()

    def _charge(self, key: Hashable, num_tokens: int) -> None:
        self._charges[key] = num_tokens
        self._charged += num_tokens

    def _discharge(self, key: Hashable) -> int | None:
        num_tokens = self._charges.pop(key, None)
        if num_tokens is None:
            return None
        self._charged -= num_tokens
        self._held.discard(key)
        if self._waiting.pop(key, None) is not None:
            self._waiting_tokens -= num_tokens
        return num_tokens

    def _begin_waiting(self) -> None:
        while self._waiting:
            key, begin = next(iter(self._waiting.items()))
            if self._held and not self._fits(self._charges[key]):
                return
            del self._waiting[key]
            self._waiting_tokens -= self._charges[key]
            begin()
