"""Serves `KvTransferService` in one worker of a prefill engine: a thread for each open fetch,
which sleeps until there is something to send."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from pdserve.channel import TRANSFER_KEEPALIVE
from pdserve.engine.kv import frames
from pdserve.engine.kv.blocks import BlockStore, CacheShape
from pdserve.engine.kv.heap import keep_freed_parts
from pdserve.engine.kv.holds import Hold, HoldTable
from pdserve.errors import ConfigError, ErrorReason, PdserveError, PrefillError, RejectedError
from pdserve.fleet_key import carries_key
from pdserve.rpc_errors import to_status
from pdserve.types import LeaseEnd
from pdserve.v1.kv_transfer_pb2 import DESCRIPTOR, FetchRequest, FetchResponse, KvManifest

PART_BYTES = 1024 * 1024
"""What a part has at most, unless one block of one layer is larger: fastest when measured."""
_MAX_FETCHES = 1024
"""Threads are made when they are needed; a fetch that found none would wait for one that waits
for the engine, which may wait for room that the first is to free."""
_OPTIONS = (
    # A reader that has stopped holds a thread until it is found out.
    *TRANSFER_KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    ("grpc.http2.max_ping_strikes", 0),
)
_SERVICE = DESCRIPTOR.services_by_name["KvTransferService"].full_name
FETCH = f"/{_SERVICE}/Fetch"

Context = grpc.ServicerContext


class TransferServer:
    """Listens from construction to `close`. `port` 0 picks a free one.

    Raises ConfigError when the address cannot be had.
    """

    def __init__(
        self,
        address: tuple[str, int],
        holds: HoldTable,
        store: BlockStore,
        shape: CacheShape,
        epoch: str,
        key: str | None,
    ) -> None:
        keep_freed_parts()
        self._holds = holds
        self._store = store
        self._shape = shape
        self._epoch = epoch
        self._key = key
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="kv-fetch"), options=_OPTIONS
        )
        handler: Any = grpc.unary_stream_rpc_method_handler(
            self._fetch, request_deserializer=FetchRequest.FromString
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Fetch": handler}),)
        )
        host, port = address
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(name)
        except RuntimeError:
            raise ConfigError(f"KV transfers cannot be served on {name}") from None
        self._server.start()

    def close(self) -> None:
        self._server.stop(0)

    def _fetch(self, request: FetchRequest, context: Context) -> Iterator[bytes]:
        try:
            self._check(request, context)
            hold = self._holds.find(request.transfer_id, context.is_active)
            if request.first_block >= hold.num_blocks:
                raise RejectedError(
                    ErrorReason.INVALID_ARGUMENT,
                    f"block {request.first_block} of {hold.num_blocks} was asked for",
                    param="first_block",
                )
            hold.take(context.cancel)
        except PdserveError as error:
            context.abort_with_status(to_status(error))
        context.add_callback(hold.wake)
        end = LeaseEnd.ABANDONED
        try:
            if (yield from self._parts(hold, request.first_block, context)):
                end = LeaseEnd.FETCHED
        except PrefillError as error:
            context.abort_with_status(to_status(error))
        finally:
            hold.leave(end)

    def _check(self, request: FetchRequest, context: Context) -> None:
        metadata = dict(context.invocation_metadata())
        if self._key is not None and not carries_key(metadata.get("authorization"), self._key):
            raise RejectedError(ErrorReason.UNAUTHENTICATED, "the fleet key is missing or wrong")
        if request.epoch != self._epoch:
            raise PrefillError(
                ErrorReason.KV_STALE_EPOCH, "the prefill engine was restarted meanwhile"
            )

    def _parts(
        self, hold: Hold, first_block: int, context: Context
    ) -> Generator[bytes, None, bool]:
        """Returns whether it came to the end, or the reader left before."""
        shape = self._shape
        manifest = KvManifest(
            num_tokens=hold.num_tokens,
            num_blocks=hold.num_blocks,
            block_size=shape.block_size,
            num_layers=shape.num_layers,
            bytes_per_block=shape.bytes_per_block,
            layout=shape.layout,
            kv_dtype=shape.kv_dtype,
        )
        yield FetchResponse(manifest=manifest).SerializeToString()
        digest = frames.Digest()
        blocks_a_part, layers_a_part = rectangle(shape)
        first = first_block
        while first < hold.num_blocks:
            readable = hold.wait(first, context.is_active)
            if readable <= first:
                return False
            while first < readable:
                last = min(first + blocks_a_part, readable)
                for start in range(0, shape.num_layers, layers_a_part):
                    layers = range(start, min(start + layers_a_part, shape.num_layers))
                    part = self._part(hold, first, last, layers, context)
                    if part is None:
                        return False
                    message, checksum = part
                    digest.add(checksum)
                    yield message
                first = last
        yield FetchResponse(digest=digest.message()).SerializeToString()
        return True

    def _part(
        self, hold: Hold, first: int, last: int, layers: range, context: Context
    ) -> tuple[bytes, int] | None:
        def copy(blocks: list[int]) -> tuple[bytes, int]:
            pieces = self._store.gather(blocks, layers)
            return frames.write(first, last - first, layers.start, len(layers), pieces)

        return hold.copy(first, last, context.is_active, copy)


def rectangle(shape: CacheShape) -> tuple[int, int]:
    """How many blocks, and how many layers of them, go into one part: all layers if they can."""
    whole = shape.bytes_per_block * shape.num_layers
    if whole <= PART_BYTES:
        return PART_BYTES // whole, shape.num_layers
    return 1, max(1, PART_BYTES // shape.bytes_per_block)
