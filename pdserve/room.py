"""Who may use how much of an engine's KV cache, where it decodes. Pure.

Every sequence is charged its worst case, prompt and longest answer, from the moment it is
promised room until it ends: a promise must hold when the KV arrives, however the others have
grown by then. Two kinds of sequence differ in one point:

- A *reserved* sequence gets room only where it fits beside all that is charged. Its prompt
  is read elsewhere only afterwards, so no prefill is wasted on a full cache, and nothing
  waits here while it holds KV there. Where the engine reads prompts for others too, each of
  these is reserved as well for as long as its blocks are held: else two such workers could
  fill each other's caches with prompts for which neither has room left.
- A *colocated* sequence is charged without asking: it brings no KV along, so the engine may
  let it wait. The charge may exceed the capacity then, and reservations are refused until
  that queue is gone; they would stand in it. It is refused only where it could never fit.

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

    @property
    def charged_tokens(self) -> int:
        return self._charged

    def reserve(self, key: Hashable, num_tokens: int) -> bool:
        """Promises room; False, and nothing charged, where there is none.

        Raises ValueError for a key that is charged already.
        """
        if key in self._charges:
            raise ValueError("reserved twice")
        if self._charged + num_tokens > self._capacity():
            return False
        self._charge(key, num_tokens)
        return True

    def commit(self, key: Hashable, num_tokens: int) -> bool:
        """Charges a sequence that begins, in place of what was reserved for it.

        False, and the reservation gone, where it cannot have that much: more than was
        reserved is granted only where it fits, and without a reservation only what could
        ever fit.
        """
        reserved = self.release(key)
        if reserved is None:
            fits = num_tokens <= self._capacity()
        else:
            fits = num_tokens <= reserved or self._charged + num_tokens <= self._capacity()
        if fits:
            self._charge(key, num_tokens)
        return fits

    def release(self, key: Hashable) -> int | None:
        """Ends the charge and returns it; None where there was none."""
        num_tokens = self._charges.pop(key, None)
        if num_tokens is not None:
            self._charged -= num_tokens
        return num_tokens

    def __contains__(self, key: Hashable) -> bool:
        return key in self._charges

    def _charge(self, key: Hashable, num_tokens: int) -> None:
        self._charges[key] = num_tokens
        self._charged += num_tokens
