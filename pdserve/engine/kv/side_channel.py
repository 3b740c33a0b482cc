"""The NIXL side channel at the holder's end: one thread that answers handshakes and questions.

Anybody who reaches the port may send to it. What cannot be answered is answered with nothing,
and counted; the thread goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

import zmq

from pdserve.engine.kv import lease
from pdserve.errors import ConfigError, ErrorReason

REMEMBERED = 4096
"""Leases that have ended and whose end is remembered."""
_POLL_MS = 200

_logger = logging.getLogger(f"vllm.{__name__}")


class HeldBlocks:
    """Which request holds which blocks of one engine. Changed by one thread and read by others."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._held: dict[str, lease.BlockGroups] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def request_ids(self) -> frozenset[str]:
        return frozenset(self._held)

    def hold(self, request_id: str, blocks: lease.BlockGroups) -> None:
        self._held[request_id] = blocks

    def end(self, request_id: str) -> None:
        """Quiet for a request that holds nothing."""
        if request_id in self._held:
            self._ended[request_id] = None
            del self._held[request_id]
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def refusal(self, ask: lease.Ask) -> ErrorReason | None:
        """None where exactly the blocks are held by the request."""
        if ask.engine_id != self._engine_id:
            return ErrorReason.KV_STALE_EPOCH
        if self._held.get(ask.request_id) == ask.blocks:
            return None
        ended = ask.request_id in self._ended
        return ErrorReason.KV_EXPIRED if ended else ErrorReason.KV_FOREIGN


class SideChannel:
    """Listens from construction to `close`. `answer` gives the frames for a message, on the
    side channel's thread, and may raise anything.

    Raises ConfigError when the address cannot be had; port 0 picks a free one.
    """

    def __init__(self, address: lease.Address, answer: Callable[[bytes], list[bytes]]) -> None:
        host, port = address
        self._answer = answer
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        self.unanswered = 0
        try:
            self._router.bind(lease.endpoint(host, port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the NIXL side channel cannot listen there: {error}") from None
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rsplit(":", 1)[1])
        self.thread = threading.Thread(
            target=self._serve, daemon=True, name="nixl_handshake_listener"
        )
        self.thread.start()

    def close(self) -> None:
        """Returns once the thread has ended."""
        self._stopped.set()
        self.thread.join()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._router.poll(_POLL_MS):
                    identity, *frames = self._router.recv_multipart()
                    self._router.send_multipart([identity, b"", *self._frames_for(frames)])
        finally:
            self._context.destroy(linger=0)

    def _frames_for(self, frames: list[bytes]) -> list[bytes]:
        try:
            _, message = frames
            return self._answer(message)
        except Exception as error:
            self.unanswered += 1
            # Whoever sends many is not to fill the log: the 1st, 2nd, 4th, 8th, ...
            if self.unanswered & (self.unanswered - 1) == 0:
                _logger.warning(
                    "a message on the NIXL side channel cannot be answered, the %d. so far: %r",
                    self.unanswered,
                    error,
                )
            return [b""]
