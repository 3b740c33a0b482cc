"""A plain copy in memory and one over a plain TCP connection: the bounds of the other ways."""

from __future__ import annotations

import socket
import threading
from struct import Struct
from typing import Any

import numpy as np

from measure.kv_transfer.cache import Cache
from measure.kv_transfer.ways import HOLDER, Prompt, WayError

_ASK = Struct("<Q")


class NoSource:
    """Of a way that has no holder."""

    def hello(self) -> None:
        pass

    def expect(self, prompt: Prompt) -> None:
        pass

    def close(self) -> None:
        pass


class MemcpyLink:
    def __init__(self, cache: Cache, num_bytes: int) -> None:
        self._into = _flat(cache)
        self._from = np.full(num_bytes, HOLDER, np.uint8)

    def copy(self, prompt: Prompt) -> None:
        np.copyto(self._into[: prompt.num_bytes], self._from[: prompt.num_bytes])

    def close(self) -> None:
        del self._from


class SocketSource:
    """Sends the first bytes of its cache, as many as it is asked for."""

    def __init__(self, cache: Cache) -> None:
        self._bytes = memoryview(_flat(cache))  # type: ignore[arg-type]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def hello(self) -> Any:
        return self._listener.getsockname()

    def expect(self, prompt: Prompt) -> None:
        pass

    def close(self) -> None:
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while asked := connection.recv(_ASK.size, socket.MSG_WAITALL):
                (num_bytes,) = _ASK.unpack(asked)
                connection.sendall(self._bytes[:num_bytes])


class SocketLink:
    def __init__(self, cache: Cache, address: tuple[str, int]) -> None:
        self._bytes = memoryview(_flat(cache))  # type: ignore[arg-type]
        self._socket = socket.create_connection(address)

    def copy(self, prompt: Prompt) -> None:
        self._socket.sendall(_ASK.pack(prompt.num_bytes))
        received = 0
        while received < prompt.num_bytes:
            count = self._socket.recv_into(self._bytes[received : prompt.num_bytes])
            if not count:
                raise WayError("the connection ended")
            received += count

    def close(self) -> None:
        self._socket.close()


def _flat(cache: Cache) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = cache.tensor.view(-1).numpy()
    return flat
