"""Connections to other engines, kept by address for the next use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Connection = TypeVar("_Connection")

KEPT = 64
"""Connections that are kept while nothing uses them, for each reader of KV blocks."""


class Connections(Generic[_Key, _Connection]):
    """Makes and closes them. Not thread-safe."""

    def __init__(
        self,
        connect: Callable[[_Key], _Connection],
        close: Callable[[_Connection], object],
        kept: int = KEPT,
    ) -> None:
        self._connect = connect
        self._close = close
        self._kept = kept
        self._open: OrderedDict[_Key, _Connection] = OrderedDict()

    def __iter__(self) -> Iterator[_Connection]:
        return iter(self._open.values())

    def to(self, key: _Key, in_use: Collection[_Key]) -> _Connection:
        """The connection to an address, which may be new; closes those that were not asked for
        for the longest time and are not `in_use`, where too many are open."""
        connection = self._open.get(key)
        if connection is None:
            connection = self._open[key] = self._connect(key)
        self._open.move_to_end(key)
        for other in [other for other in self._open if other != key and other not in in_use]:
            if len(self._open) <= self._kept:
                break
            self._close(self._open.pop(other))
        return connection

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem()[1])
