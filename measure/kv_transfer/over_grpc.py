"""pdserve's own transport, with the classes that run inside the engine."""

from __future__ import annotations

import threading
import time

from measure.kv_transfer.cache import Cache
from measure.kv_transfer.jobs import BLOCK_SIZE, CHUNK_TOKENS
from measure.kv_transfer.ways import Prompt, WayError, until
from pdserve.engine.kv.grpc_fetch import Fetched, Fetcher, Order
from pdserve.engine.kv.grpc_server import TransferServer
from pdserve.engine.kv.holds import Hold, HoldTable

_EPOCH = "benchmark"
_HOST = "127.0.0.1"
_TIMEOUT_S = 30.0


class GrpcSource:
    def __init__(self, cache: Cache) -> None:
        self._table = HoldTable()
        self._server = TransferServer(
            (_HOST, 0), self._table, cache.store(), cache.shape, _EPOCH, None
        )
        self._engine: threading.Thread | None = None
        self.last_chunk_at = 0.0

    def hello(self) -> int:
        return self._server.port

    def expect(self, prompt: Prompt) -> None:
        self._table.expire_at(str(prompt.number - 1), 0)
        self._table.sweep()
        hold = Hold(str(prompt.number), prompt.num_tokens, len(prompt.theirs))
        self._table.open(hold)
        if prompt.chunk_s:
            self._engine = threading.Thread(target=self._compute, args=(hold, prompt))
            self._engine.start()
        else:
            hold.extend(prompt.theirs, len(prompt.theirs), _nothing)

    def close(self) -> None:
        self._server.close()

    def _compute(self, hold: Hold, prompt: Prompt) -> None:
        """What an engine does: a chunk of the prompt at a time."""
        step = CHUNK_TOKENS // BLOCK_SIZE
        for first in range(0, len(prompt.theirs), step):
            time.sleep(prompt.chunk_s)
            blocks = prompt.theirs[first : first + step]
            self.last_chunk_at = time.monotonic()
            hold.extend(blocks, first + len(blocks), _nothing)


class GrpcLink:
    def __init__(self, cache: Cache, port: int) -> None:
        self._port = port
        self._fetcher = Fetcher(cache.store(), cache.shape, 0, None, _TIMEOUT_S)

    def copy(self, prompt: Prompt) -> None:
        number = str(prompt.number)
        order = Order(
            number, number, _EPOCH, _HOST, [self._port], prompt.num_tokens, 0, prompt.ours
        )
        ended: list[Fetched] = []

        def over() -> bool:
            ended.extend(self._fetcher.finished())
            return bool(ended)

        self._fetcher.start(order)
        until(over, prompt.num_bytes)
        if ended[0].failure is not None:
            raise WayError(str(ended[0].failure))

    def close(self) -> None:
        self._fetcher.close()


def _nothing() -> None:
    pass
