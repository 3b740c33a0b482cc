"""What vLLM's prefix cache holds: its own events, put into the names of `pdserve.prefix`.

vLLM's engine process publishes them over ZeroMQ, on a Unix socket in the engine's own folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from msgspec.msgpack import Decoder

from pdserve.cache_reports import cache_reports
from pdserve.cached_blocks import CachedBlocks
from pdserve.clock import RealClock
from pdserve.prefix import extend, root

_log = structlog.get_logger("cache")

_PROOF_S = 2.0
"""How long an engine may take to tell of a block."""

Hash = int | bytes
"""What vLLM calls a block."""


class BlockNames:
    """Follows vLLM's events and keeps `blocks` as they say.

    vLLM may hold a block of one content several times, and tells of each: the last one counts.
    A block that cannot be named, and all that follow it, are left out: `complete` is False
    from then on.
    """

    def __init__(self, block_size: int, blocks: CachedBlocks) -> None:
        self.complete = True
        self._block_size = block_size
        self._blocks = blocks
        self._names: dict[Hash, int] = {}
        self._copies: dict[Hash, int] = {}

    def take(self, event: Any) -> None:
        """One event of vLLM's `KVEventBatch`."""
        kind = type(event).__name__
        # Other groups are caches of other layers, and none of them alone says what is saved.
        if getattr(event, "group_idx", None):
            self.complete = False
        elif kind == "BlockStored":
            self._stored(event)
        elif kind == "BlockRemoved":
            self._removed(event.block_hashes)
        elif kind == "AllBlocksCleared":
            self.clear()

    def clear(self) -> None:
        self._names.clear()
        self._copies.clear()
        self._blocks.clear()

    def _stored(self, event: Any) -> None:
        hashes: Sequence[Hash] = event.block_hashes
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size:
            self.complete = False
            return
        names = extend(parent, event.token_ids, self._block_size)
        for block, name in zip(hashes, names, strict=True):
            self._names[block] = name
            self._copies[block] = self._copies.get(block, 0) + 1
        self._blocks.add(names)

    def _parent(self, event: Any) -> int | None:
        """The name before the event's first block; None where there is none.

        What a block is of beside its tokens stands in its extra keys: in our requests that is
        the adapter, if there is one, with each block, and the salt with the first.
        """
        own = (event.lora_name,) if event.lora_name else ()
        first, *others = (tuple(keys or ()) for keys in event.extra_keys or [own])
        if any(keys != own for keys in others) or first[: len(own)] != own:
            return None
        match first[len(own) :]:
            case () if event.parent_block_hash is not None:
                return self._names.get(event.parent_block_hash)
            case () if event.parent_block_hash is None:
                return root("", event.lora_name or "")
            case (str(salt),) if event.parent_block_hash is None:
                return root(salt, event.lora_name or "")
        return None

    def _removed(self, hashes: Sequence[Hash]) -> None:
        gone = []
        for block in hashes:
            left = self._copies.get(block, 0) - 1
            if left > 0:
                self._copies[block] = left
            elif left == 0:
                del self._copies[block]
                gone.append(self._names.pop(block))
        self._blocks.remove(gone)


class CacheFollower:
    """Keeps `blocks` as the events of one engine say, which need not have started yet."""

    def __init__(self, folder: Path) -> None:
        """The engine's own folder, where the socket will be."""
        import zmq
        import zmq.asyncio

        self.blocks = CachedBlocks()
        self.endpoint = f"ipc://{folder / 'kv-events'}"
        self._names: BlockNames | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._socket.connect(self.endpoint)
        self._reading: asyncio.Task[None] | None = None

    def follow(self, block_size: int) -> None:
        """Has `blocks` kept from now on; once vLLM has been imported."""
        self._names = BlockNames(block_size, self.blocks)
        self._reading = asyncio.create_task(self._read(self._names), name="cache events")
        self._reading.add_done_callback(self._ended)

    async def tells(self, block: int) -> bool:
        """Whether the engine has told of a block that it has just read, and of no other cache
        beside; it is given a moment."""
        try:
            async with asyncio.timeout(_PROOF_S):
                async for _ in cache_reports(self.blocks, RealClock(), _PROOF_S / 100):
                    if block in self.blocks:
                        break
        except TimeoutError:
            return False
        return self._names is not None and self._names.complete

    async def close(self) -> None:
        self.blocks.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._socket.close()
        self._context.term()

    def _ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and (error := reading.exception()) is not None:
            _log.error("the engine's cache is not followed any more", exc_info=error)
            self.blocks.clear()

    async def _read(self, names: BlockNames) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        decoder = Decoder(KVEventBatch)
        due = 0
        while True:
            _, number, payload = await self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence != due:
                # Blocks may have gone unheard: what is not told anew is not believed.
                _log.warning("events of the engine's cache were missed", due=due, got=sequence)
                names.clear()
            due = sequence + 1
            for event in decoder.decode(payload).events:
                names.take(event)
