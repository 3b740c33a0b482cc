"""An engine's KV cache as rows of bytes: layer by layer, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Wait = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What two caches must share for the bytes of one to mean anything in the other."""

    block_size: int
    num_layers: int
    bytes_per_block: int
    layout: str
    kv_dtype: str


class BlockStore(Protocol):
    """Copies blocks out of a KV cache and into it; `blocks` are numbers of the engine's."""

    def gather(self, blocks: list[int], layers: range) -> list[memoryview]:
        """The bytes layer by layer; views of the cache itself where it is in this memory."""
        ...

    def scatter(self, blocks: list[int], layers: range, data: bytes | memoryview) -> None: ...

    def written(self) -> Wait:
        """What to call before what the engine has computed so far is gathered."""
        ...


def block_rows(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Each layer's cache as a tensor of bytes, a row for each block.

    Raises ValueError for a cache whose blocks do not lie one after the other.
    """
    rows = []
    for name, cache in kv_caches.items():
        if not cache.is_contiguous() or cache.numel() % num_blocks:
            raise ValueError(f"the gRPC KV transport cannot serve the cache of {name}")
        rows.append(cache.view(-1).view(torch.uint8).view(num_blocks, -1))
    if len({(layer.shape[1], layer.device) for layer in rows}) != 1:
        raise ValueError("the gRPC KV transport needs layers of one shape and on one device")
    return rows


def block_store(rows: list[torch.Tensor]) -> BlockStore:
    return HostBlocks(rows) if rows[0].device.type == "cpu" else DeviceBlocks(rows)


class HostBlocks:
    """A cache in main memory: nothing is copied but by the caller."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._layers: list[Rows] = [layer.numpy() for layer in rows]

    def gather(self, blocks: list[int], layers: range) -> list[memoryview]:
        runs = list(_runs(blocks))
        return [
            memoryview(self._layers[layer][first:last]).cast("B")  # type: ignore[arg-type]
            for layer in layers
            for first, last in runs
        ]

    def scatter(self, blocks: list[int], layers: range, data: bytes | memoryview) -> None:
        width = self._layers[0].shape[1]
        given = np.frombuffer(data, np.uint8).reshape(len(layers), len(blocks), width)
        for source, layer in zip(given, layers, strict=True):
            begin = 0
            for first, last in _runs(blocks):
                end = begin + last - first
                self._layers[layer][first:last] = source[begin:end]
                begin = end

    def written(self) -> Wait:
        return _nothing


class DeviceBlocks:
    """A cache on a GPU, by way of pinned main memory and a stream of its own."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._layers = rows
        self._stream: Any = torch.cuda.Stream(rows[0].device)  # type: ignore[no-untyped-call]

    def gather(self, blocks: list[int], layers: range) -> list[memoryview]:
        numbers = torch.tensor(blocks, device=self._layers[0].device)
        width = self._layers[0].shape[1]
        staged = torch.empty((len(layers), len(blocks), width), dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            for place, layer in enumerate(layers):
                staged[place].copy_(self._layers[layer][numbers], non_blocking=True)
            self._stream.synchronize()
        return [memoryview(staged.numpy()).cast("B")]  # type: ignore[arg-type]

    def scatter(self, blocks: list[int], layers: range, data: bytes | memoryview) -> None:
        numbers = torch.tensor(blocks, device=self._layers[0].device)
        width = self._layers[0].shape[1]
        staged = torch.empty((len(layers), len(blocks), width), dtype=torch.uint8, pin_memory=True)
        staged.view(-1).numpy()[:] = np.frombuffer(data, np.uint8)
        with torch.cuda.stream(self._stream):
            for place, layer in enumerate(layers):
                moved = staged[place].to(self._layers[layer].device, non_blocking=True)
                self._layers[layer].index_copy_(0, numbers, moved)
            self._stream.synchronize()

    def written(self) -> Wait:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        wait: Wait = event.synchronize
        return wait


def _nothing() -> None:
    pass


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Stretches of consecutive numbers, as (first, one after the last)."""
    first = last = blocks[0]
    for block in blocks[1:]:
        if block != last + 1:
            yield first, last + 1
            first = block
        last = block
    yield first, last + 1
