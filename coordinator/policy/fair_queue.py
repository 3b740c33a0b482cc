"""Whose turn it is: hierarchical start-time fair queueing, by tokens and weights. Pure.

Each flow has a virtual time at which its next item may start: that of its last item plus the
item's tokens over the flow's weight. The least goes first, and a flow that comes back begins
at the present, so that nobody saves up and nobody starves (Goyal, Vin, Cheng: "Start-time fair
queueing", SIGCOMM 1996). Flows are leaves of a tree and share their parent's part (Bennett,
Zhang: "Hierarchical packet fair queueing algorithms", SIGCOMM 1996). What an item cost beyond
what was known is charged to its flows afterwards (Sheng et al.: "Fairness in serving large
language models", OSDI 2024). Each operation takes O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MIN_DEAD = 64


@dataclass(frozen=True, slots=True)
class Share:
    """One step of an item's way from the root to its flow, and the flow's weight there."""

    key: Hashable
    weight: float = 1.0


class Place(Generic[T]):
    """One item in the queue."""

    __slots__ = ("_entry", "_flow", "item", "tokens")

    def __init__(self, item: T, tokens: int, flow: _Flow[T], entry: _Entry[Place[T]]) -> None:
        self.item = item
        self.tokens = tokens
        self._flow = flow
        self._entry = entry


class FairQueue(Generic[T]):
    """Items by flow; within a flow the least `order` is first, then the first to come."""

    def __init__(self) -> None:
        self._root: _Flow[T] = _Flow(None, 1.0)

    def __len__(self) -> int:
        return self._root.count

    @property
    def tokens(self) -> int:
        """Of all items together."""
        return self._root.tokens

    def part(self, key: Hashable) -> tuple[int, int]:
        """(items, tokens) below one key of the first step."""
        flow = self._root.children.get(key)
        return (0, 0) if flow is None else (flow.count, flow.tokens)

    def push(self, path: tuple[Share, ...], tokens: int, order: float, item: T) -> Place[T]:
        """`tokens` is what the item is known to cost. All paths are equally long."""
        flow = self._root
        for share in path:
            flow = flow.child(share)
        place = Place(item, tokens, flow, _NEVER)
        place._entry = flow.items.push(order, place)
        for it in flow.up():
            it.gain(tokens)
        return place

    def head(self) -> Place[T] | None:
        """Whose turn it is."""
        flow = self._root
        while (below := flow.flows.first()) is not None:
            flow = below
        return flow.items.first()

    def take(self, place: Place[T]) -> None:
        """Serves the head: time goes on to its start, and its flows pay for it."""
        for flow in place._flow.up():
            flow.pay_at_start(place.tokens)
        self.remove(place)

    def remove(self, place: Place[T]) -> None:
        """Drops an item that is in the queue, at no cost to its flows."""
        place._flow.items.discard(place._entry)
        for flow in place._flow.up():
            flow.lose(place.tokens)

    def charge(self, place: Place[T], tokens: float) -> None:
        """Has the flows of an item that was served pay for what it cost besides."""
        for flow in place._flow.up():
            flow.pay(tokens)

    def ahead(self, path: tuple[Share, ...]) -> float:
        """Tokens in the queue that would be served before one more item of this path.

        Of the fluid model: at most all of them, and at most what the others' weights let them
        have until the item's flow has had its turn.
        """
        way: list[tuple[_Flow[T], Share, _Flow[T] | None]] = []
        at: _Flow[T] | None = self._root
        for share in path:
            below = None if at is None else at.children.get(share.key)
            if at is not None:
                way.append((at, share, below))
            at = below
        ahead: float = 0 if at is None else at.tokens
        for parent, share, flow in reversed(way):
            ahead = parent.before(share, flow, ahead)
        return ahead


class _Flow(Generic[T]):
    """A node of the tree; `count` and `tokens` are those of the items below it.

    `start` is when its next item may start, on the parent's virtual time `now`.
    """

    __slots__ = (
        "_entry",
        "_parent",
        "busy_weight",
        "children",
        "count",
        "flows",
        "items",
        "now",
        "start",
        "tokens",
        "weight",
    )

    def __init__(self, parent: _Flow[T] | None, weight: float) -> None:
        self._parent = parent
        self._entry: _Entry[_Flow[T]] = _NEVER
        self.weight = weight
        self.start = 0.0
        self.count = 0
        self.tokens = 0
        self.now = 0.0
        self.busy_weight = 0.0
        self.children: dict[Hashable, _Flow[T]] = {}
        self.flows: _Heap[_Flow[T]] = _Heap()
        self.items: _Heap[Place[T]] = _Heap()

    def child(self, share: Share) -> _Flow[T]:
        flow = self.children.get(share.key)
        if flow is None:
            flow = self.children[share.key] = _Flow(self, share.weight)
        elif not flow.count:
            flow.weight = share.weight
        return flow

    def up(self) -> list[_Flow[T]]:
        """This flow and those above it, the root last."""
        flows = [self]
        while (parent := flows[-1]._parent) is not None:
            flows.append(parent)
        return flows

    def gain(self, tokens: int) -> None:
        self.tokens += tokens
        self.count += 1
        if self.count == 1 and self._parent is not None:
            self.start = max(self.start, self._parent.now)
            self._parent.busy_weight += self.weight
            self._entry = self._parent.flows.push(self.start, self)

    def lose(self, tokens: int) -> None:
        self.tokens -= tokens
        self.count -= 1
        if self.count == 0 and self._parent is not None:
            self._parent.busy_weight -= self.weight
            self._parent.flows.discard(self._entry)

    def pay_at_start(self, tokens: float) -> None:
        if self._parent is not None:
            self._parent.now = max(self._parent.now, self.start)
            self.pay(tokens)

    def pay(self, tokens: float) -> None:
        self.start += tokens / self.weight
        if self.count and self._parent is not None:
            self._parent.flows.discard(self._entry)
            self._entry = self._parent.flows.push(self.start, self)

    def before(self, share: Share, flow: _Flow[T] | None, ahead: float) -> float:
        """Tokens that go before one more item of `flow`, before which `ahead` of its own go."""
        busy_weight = self.busy_weight
        if flow is None or not flow.count:
            busy_weight += share.weight
        start = self.now if flow is None else max(self.now, flow.start)
        weight = share.weight if flow is None else flow.weight
        return min(self.tokens, (start - self.now + ahead / weight) * busy_weight)


class _Entry(Generic[T]):
    __slots__ = ("item", "key")

    def __init__(self, key: tuple[float, int], item: T | None) -> None:
        self.key = key
        self.item = item

    def __lt__(self, other: _Entry[T]) -> bool:
        return self.key < other.key


_NEVER: _Entry[Any] = _Entry((0.0, 0), None)


class _Heap(Generic[T]):
    """A heap from which anything may be dropped; what was dropped is held for a while only."""

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []
        self._dead = 0
        self._number = count()

    def push(self, key: float, item: T) -> _Entry[T]:
        entry = _Entry((key, next(self._number)), item)
        heapq.heappush(self._entries, entry)
        return entry

    def discard(self, entry: _Entry[T]) -> None:
        entry.item = None
        self._dead += 1
        if self._dead > max(_MIN_DEAD, len(self._entries) // 2):
            self._entries = [entry for entry in self._entries if entry.item is not None]
            heapq.heapify(self._entries)
            self._dead = 0

    def first(self) -> T | None:
        while self._entries:
            item = self._entries[0].item
            if item is not None:
                return item
            heapq.heappop(self._entries)
            self._dead -= 1
        return None
