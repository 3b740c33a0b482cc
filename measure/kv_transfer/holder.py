"""The process that has the blocks. `python -m measure.kv_transfer.holder MODEL_JSON TOKENS`

Prints its address as a JSON line, and serves one reader.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Listener
from typing import Any

import msgspec

from measure.kv_transfer.cache import Cache
from measure.kv_transfer.jobs import Model, Way
from measure.kv_transfer.over_grpc import GrpcSource
from measure.kv_transfer.over_nixl import NixlSource
from measure.kv_transfer.plain import NoSource, SocketSource
from measure.kv_transfer.ways import HOLDER, Prompt, Source


def main(model_json: str, num_tokens: str) -> None:
    cache = Cache(msgspec.json.decode(model_json, type=Model), int(num_tokens), HOLDER)
    with Listener(family="AF_UNIX") as listener:
        event = {"event": "ready", "address": listener.address, "blocks": cache.num_blocks}
        print(json.dumps(event), flush=True)
        with listener.accept() as reader:
            _serve(reader, cache)


def _serve(reader: Any, cache: Cache) -> None:
    """Each message is answered: a way is opened, a prompt expected, None closes the way."""
    source: Source = NoSource()
    while True:
        try:
            message = reader.recv()
        except EOFError:
            return
        match message:
            case Way():
                source = _source(message, cache)
                reader.send(source.hello())
            case Prompt():
                source.expect(message)
                reader.send(None)
            case None:
                source.close()
                reader.send(None)
            case "last chunk":
                assert isinstance(source, GrpcSource)
                reader.send(source.last_chunk_at)


def _source(way: Way, cache: Cache) -> Source:
    match way:
        case Way.MEMCPY:
            return NoSource()
        case Way.SOCKET:
            return SocketSource(cache)
        case Way.GRPC:
            return GrpcSource(cache)
        case Way.NIXL_SHM | Way.NIXL_TCP:
            return NixlSource(way, cache)


if __name__ == "__main__":
    main(*sys.argv[1:])
