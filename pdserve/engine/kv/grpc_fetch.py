"""Fetches KV blocks into one worker of a decode engine: a thread for each fetch, which sleeps
until there is something to take in."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError as ParseError
from grpc.experimental import ChannelOptions

from pdserve.channel import TRANSFER_OPTIONS
from pdserve.engine.kv import frames
from pdserve.engine.kv.blocks import BlockStore, CacheShape
from pdserve.engine.kv.connections import Connections
from pdserve.engine.kv.grpc_server import FETCH
from pdserve.engine.kv.heap import keep_freed_parts
from pdserve.errors import DecodeError, ErrorReason
from pdserve.fleet_key import call_metadata
from pdserve.rpc_errors import from_rpc_error
from pdserve.v1.kv_transfer_pb2 import FetchRequest, KvDigest, KvManifest

_MAX_FETCHES = 1024
_OPTIONS = (
    *TRANSFER_OPTIONS,
    # The fetch's own thread takes its messages from gRPC: no second one is woken for each.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    # gRPC's 16 KiB would make the reader work through 64 frames a part.
    ("grpc.http2.max_frame_size", 1024 * 1024),
)


@dataclass(frozen=True, slots=True)
class Order:
    """Blocks to be fetched: those of the prompt from `first_block` on, into `blocks`.

    `ports` are those of the holder's workers, by rank.
    """

    request_id: str
    transfer_id: str
    epoch: str
    host: str
    ports: list[int]
    num_tokens: int
    first_block: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a fetch ended; its thread writes no more. `failure` is None for success.

    `seconds` are from the first blocks on: before them, the holder may not have read the prompt.
    """

    order: Order
    num_bytes: int
    seconds: float
    failure: DecodeError | None


@dataclass(slots=True)
class _Running:
    order: Order
    address: str
    progress: float
    call: Any = None
    cancelled: bool = False


class Fetcher:
    """`start`, `cancel` and `finished` belong to the engine's thread."""

    def __init__(
        self, store: BlockStore, shape: CacheShape, rank: int, key: str | None, timeout_s: float
    ) -> None:
        """`timeout_s` is how long a holder that lives may send nothing."""
        keep_freed_parts()
        self._rank = rank
        self._store = store
        self._shape = shape
        self._metadata = call_metadata(key)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="kv-fetch")
        self._channels = Connections(_connect, lambda channel: channel.close())
        self._running: dict[str, _Running] = {}
        self._ended: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def start(self, order: Order) -> None:
        host = f"[{order.host}]" if ":" in order.host else order.host
        address = f"{host}:{order.ports[self._rank]}"
        in_use = {running.address for running in self._running.values()}
        channel = self._channels.to(address, in_use)
        running = _Running(order, address, time.monotonic())
        self._running[order.request_id] = running
        self._threads.submit(self._run, running, channel)

    def cancel(self, request_id: str) -> None:
        """Ends a fetch at once; it is told by `finished` like any other."""
        running = self._running.get(request_id)
        if running is not None:
            with self._lock:
                running.cancelled = True
                call = running.call
            if call is not None:
                call.cancel()

    def finished(self) -> list[Fetched]:
        """What has ended since the last call."""
        late = time.monotonic() - self._timeout_s
        for running in self._running.values():
            if running.progress < late:
                self.cancel(running.order.request_id)
        ended = []
        while not self._ended.empty():
            fetched = self._ended.get()
            del self._running[fetched.order.request_id]
            ended.append(fetched)
        return ended

    def close(self) -> None:
        for request_id in self._running:
            self.cancel(request_id)
        self._channels.close()
        self._threads.shutdown(wait=False)

    def _run(self, running: _Running, channel: grpc.Channel) -> None:
        intake = _Intake(running.order, self._store, self._shape)
        failure = None
        try:
            self._fetch(running, channel, intake)
        except DecodeError as error:
            failure = error
        except Exception as error:
            failure = _cause(error)
        seconds = time.monotonic() - (intake.begun or time.monotonic())
        self._ended.put(Fetched(running.order, intake.num_bytes, seconds, failure))

    def _fetch(self, running: _Running, channel: grpc.Channel, intake: _Intake) -> None:
        order = running.order
        request = FetchRequest(
            transfer_id=order.transfer_id, epoch=order.epoch, first_block=order.first_block
        )
        fetch: Any = channel.unary_stream(FETCH, request_serializer=FetchRequest.SerializeToString)
        call = fetch(request, metadata=self._metadata)
        with self._lock:
            running.call = call
            cancelled = running.cancelled
        if cancelled:
            call.cancel()
        try:
            for message in call:
                running.progress = time.monotonic()
                intake.take(message)
        finally:
            call.cancel()
            # gRPC keeps what belongs to a call until its end has been taken.
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
        intake.require_complete()


class _Intake:
    """Takes the parts of one stream into the cache, and knows whether they are all there."""

    def __init__(self, order: Order, store: BlockStore, shape: CacheShape) -> None:
        self._order = order
        self._store = store
        self._shape = shape
        self._digest = frames.Digest()
        self._told: KvDigest | None = None
        self._manifest = False
        self.begun: float | None = None
        self._next = (0, 0)
        self.num_bytes = 0

    def take(self, message: bytes) -> None:
        """Raises DecodeError KV_TRANSFER_FAILED or KV_INCOMPATIBLE."""
        try:
            part = frames.read(message)
        except ParseError:
            raise _failed("a part cannot be parsed") from None
        if isinstance(part, frames.Part) and self._manifest and self._told is None:
            self._take_blocks(part)
        elif isinstance(part, KvManifest) and not self._manifest:
            self._manifest = True
            self._check(part)
        elif isinstance(part, KvDigest) and self._manifest:
            self._told = part
        else:
            raise _failed("a part came out of order")

    def require_complete(self) -> None:
        shape = self._shape
        expected = len(self._order.blocks) * shape.num_layers * shape.bytes_per_block
        if self._told is None or self._next != (len(self._order.blocks), 0):
            raise _failed(f"{self.num_bytes} of {expected} bytes came")
        if self._told != self._digest.message():
            raise _failed("the digest is not that of the parts")

    def _check(self, manifest: KvManifest) -> None:
        order = self._order
        theirs = CacheShape(
            manifest.block_size,
            manifest.num_layers,
            manifest.bytes_per_block,
            manifest.layout,
            manifest.kv_dtype,
        )
        if theirs != self._shape:
            raise DecodeError(
                ErrorReason.KV_INCOMPATIBLE, f"the KV cache there is {theirs}, here {self._shape}"
            )
        num_blocks = order.first_block + len(order.blocks)
        if (manifest.num_tokens, manifest.num_blocks) != (order.num_tokens, num_blocks):
            raise _failed(
                f"{manifest.num_tokens} tokens in {manifest.num_blocks} blocks are held, "
                f"{order.num_tokens} in {num_blocks} were asked for"
            )

    def _take_blocks(self, part: frames.Part) -> None:
        self.begun = self.begun or time.monotonic()
        if not frames.sound(part):
            raise _failed("the bytes of a part do not match their checksum")
        order, shape = self._order, self._shape
        begin = part.first_block - order.first_block
        end = begin + part.num_blocks
        layers = range(part.first_layer, part.first_layer + part.num_layers)
        size = part.num_blocks * part.num_layers * shape.bytes_per_block
        fits = part.num_blocks and end <= len(order.blocks) and layers.stop <= shape.num_layers
        if (begin, layers.start) != self._next or not fits or len(part.data) != size:
            raise _failed("a part is not the next one of this transfer")
        self._store.scatter(order.blocks[begin:end], layers, part.data)
        self._next = (end, 0) if layers.stop == shape.num_layers else (begin, layers.stop)
        self._digest.add(part.checksum)
        self.num_bytes += size


def _connect(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=_OPTIONS)


def _failed(message: str) -> DecodeError:
    return DecodeError(ErrorReason.KV_TRANSFER_FAILED, message)


def _cause(error: Exception) -> DecodeError:
    if isinstance(error, grpc.RpcError):
        cause = from_rpc_error(error, lost=ErrorReason.KV_TRANSFER_FAILED)
        if cause.reason.concerns_kv:
            return DecodeError(cause.reason, cause.message)
        # Whatever else a holder says is no word on the request, which it knows nothing of.
        return _failed(f"the holder of the KV blocks refused: {cause.message}")
    return _failed(f"{type(error).__name__}: {error}")
