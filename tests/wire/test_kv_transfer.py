"""KV blocks over real gRPC, from one cache in memory to another: no engine, no model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from pdserve.engine.kv import frames, grpc_server, holds
from pdserve.engine.kv.blocks import CacheShape, block_rows, block_store
from pdserve.engine.kv.grpc_fetch import Fetched, Fetcher, Order
from pdserve.engine.kv.grpc_server import FETCH, TransferServer, rectangle
from pdserve.engine.kv.holds import Hold, HoldTable
from pdserve.errors import ErrorReason
from pdserve.types import LeaseEnd
from pdserve.v1.kv_transfer_pb2 import FetchRequest
from tests.support.patience import WITHIN_S, eventually

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 40, 3, 32
SHAPE = CacheShape(BLOCK_SIZE, NUM_LAYERS, 2 * BLOCK_SIZE * 16 * 2, "LBHNC", "bfloat16")
HOLDER_BLOCKS = [7, 8, 9, 3, 30, 31, 12]
READER_BLOCKS = [20, 1, 2, 3, 39, 17, 16]
NUM_TOKENS = 7 * BLOCK_SIZE - 5


def cache(seed: int) -> dict[str, torch.Tensor]:
    """Layers of [blocks, heads, tokens, content], as vLLM lays them out, full of noise."""
    torch.manual_seed(seed)
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 16)
    return {f"layer.{i}": torch.randn(shape).to(torch.bfloat16) for i in range(NUM_LAYERS)}


@dataclass
class Pair:
    """A holder and a reader, and what the test does to the holder's engine."""

    theirs: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor]
    table: HoldTable
    server: TransferServer
    fetcher: Fetcher

    def admit(self) -> Hold:
        hold = Hold("t", NUM_TOKENS, len(HOLDER_BLOCKS))
        self.table.open(hold)
        return hold

    def read_prompt(self) -> Hold:
        hold = self.admit()
        hold.extend(HOLDER_BLOCKS, len(HOLDER_BLOCKS), lambda: None)
        self.table.expire_at("t", 30)
        return hold

    def begin(self) -> Hold:
        """A fetch that has the first block and waits for the second."""
        hold = self.admit()
        self.fetcher.start(self.order())
        hold.extend(HOLDER_BLOCKS[:1], 1, lambda: None)
        ours, theirs = self.ours["layer.2"], self.theirs["layer.2"]
        there = functools.partial(torch.equal, ours[READER_BLOCKS[0]], theirs[HOLDER_BLOCKS[0]])
        assert eventually(there, WITHIN_S)
        return hold

    def order(self, first_block: int = 0) -> Order:
        return Order(
            *("request", "t", "epoch", "127.0.0.1", [self.server.port], NUM_TOKENS, first_block),
            READER_BLOCKS[first_block:],
        )

    def fetch(self, order: Order | None = None) -> Fetched:
        self.fetcher.start(order or self.order())
        return self.ended()

    def ended(self, within_s: float = WITHIN_S) -> Fetched:
        (fetched,) = eventually(self.fetcher.finished, within_s)
        return fetched

    def require_equal(self, first_block: int = 0) -> None:
        """The fetched blocks are the holder's; every other block is as it was."""
        before = cache(2)
        for name, layer in self.ours.items():
            expected = before[name]
            theirs = HOLDER_BLOCKS[first_block:]
            expected[READER_BLOCKS[first_block:]] = self.theirs[name][theirs]
            assert torch.equal(layer.view(torch.int16), expected.view(torch.int16))

    def require_untouched(self) -> None:
        for name, layer in cache(2).items():
            assert torch.equal(self.ours[name].view(torch.int16), layer.view(torch.int16))


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(
        key: str | None = None,
        readers_key: str | None = None,
        shape: CacheShape = SHAPE,
        timeout_s: float = WITHIN_S,
    ) -> Pair:
        theirs, ours, table = cache(1), cache(2), HoldTable()
        from_rows, to_rows = block_rows(theirs, NUM_BLOCKS), block_rows(ours, NUM_BLOCKS)
        address = ("127.0.0.1", 0)
        server = TransferServer(address, table, block_store(from_rows), SHAPE, "epoch", key)
        fetcher = Fetcher(block_store(to_rows), shape, 0, readers_key, timeout_s)
        made.append(Pair(theirs, ours, table, server, fetcher))
        return made[-1]

    yield make
    for pair in made:
        pair.fetcher.close()
        pair.server.close()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


def reason(fetched: Fetched) -> ErrorReason:
    assert fetched.failure is not None
    return fetched.failure.reason


@pytest.mark.parametrize("part_bytes", [1, 3_000, 10_000, 2**21], ids=str)
@pytest.mark.parametrize("first_block", [0, 4, 6])
def test_the_blocks_arrive_and_no_other_changes(
    pair: Pair, first_block: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "PART_BYTES", part_bytes)
    hold = pair.read_prompt()
    fetched = pair.fetch(pair.order(first_block))
    assert fetched.failure is None
    blocks = len(HOLDER_BLOCKS) - first_block
    assert fetched.num_bytes == blocks * NUM_LAYERS * SHAPE.bytes_per_block
    pair.require_equal(first_block)
    assert eventually(lambda: hold.end, WITHIN_S) is LeaseEnd.FETCHED
    assert pair.table.sweep() == {"t": LeaseEnd.FETCHED}


def test_blocks_are_fetched_while_the_prompt_is_read(pair: Pair) -> None:
    hold = pair.begin()
    assert not pair.fetcher.finished()
    hold.extend(HOLDER_BLOCKS[1:], 7, lambda: None)
    assert pair.ended().failure is None
    pair.require_equal()


def test_a_reader_may_come_before_the_prompt(pair: Pair) -> None:
    pair.fetcher.start(pair.order())
    assert not pair.fetcher.finished()
    pair.read_prompt()
    assert pair.ended().failure is None
    pair.require_equal()


def test_a_transfer_that_nobody_holds_is_foreign(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "UNSEEN_S", 0.05)
    assert reason(pair.fetch()) is ErrorReason.KV_FOREIGN


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize(
    ("end", "refusal"),
    [
        (LeaseEnd.FETCHED, ErrorReason.KV_REUSED),
        (LeaseEnd.ABANDONED, ErrorReason.KV_REUSED),
        (LeaseEnd.RELEASED, ErrorReason.KV_EXPIRED),
        (LeaseEnd.EXPIRED, ErrorReason.KV_EXPIRED),
        (LeaseEnd.LOST, ErrorReason.KV_TRANSFER_FAILED),
    ],
)
def test_a_hold_that_has_ended_is_refused_at_once_by_how_it_ended(
    pair: Pair, end: LeaseEnd, refusal: ErrorReason, swept: bool
) -> None:
    hold = pair.read_prompt()
    hold.finish(end)
    if swept:
        pair.table.close("t", LeaseEnd.LOST)
    assert reason(pair.fetch()) is refusal
    pair.require_untouched()


@pytest.mark.parametrize("first_block", [7, 8, 2**32 - 1])
def test_blocks_beyond_the_prompt_are_refused_and_end_nothing(pair: Pair, first_block: int) -> None:
    hold = pair.read_prompt()
    fetched = pair.fetch(replace(pair.order(6), first_block=first_block))
    assert reason(fetched) is ErrorReason.KV_TRANSFER_FAILED
    assert fetched.failure is not None
    assert f"block {first_block} of 7" in fetched.failure.message
    assert hold.end is None
    assert pair.fetch().failure is None
    pair.require_equal()


def test_another_epoch_is_refused(pair: Pair) -> None:
    pair.read_prompt()
    assert reason(pair.fetch(replace(pair.order(), epoch="old"))) is ErrorReason.KV_STALE_EPOCH


def test_blocks_are_fetched_once(pair: Pair) -> None:
    hold = pair.begin()
    pair.fetcher.start(replace(pair.order(), request_id="second"))
    second = pair.ended()
    assert (second.order.request_id, reason(second)) == ("second", ErrorReason.KV_REUSED)
    hold.extend(HOLDER_BLOCKS[1:], 7, lambda: None)
    assert pair.ended().failure is None


@pytest.mark.parametrize("readers_key", [None, "wrong"])
def test_a_reader_must_carry_the_fleet_key(
    make_pair: Callable[..., Pair], readers_key: str | None
) -> None:
    pair = make_pair(key="right", readers_key=readers_key)
    pair.read_prompt()
    fetched = pair.fetch()
    assert reason(fetched) is ErrorReason.KV_TRANSFER_FAILED
    assert fetched.failure is not None
    assert "the fleet key is missing or wrong" in fetched.failure.message


def test_a_reader_with_the_fleet_key_is_served(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(key="right", readers_key="right")
    pair.read_prompt()
    assert pair.fetch().failure is None


@pytest.mark.parametrize(
    "change",
    [{"block_size": 64}, {"num_layers": 2}, {"layout": "NHD"}, {"kv_dtype": "float16"}],
    ids=lambda change: next(iter(change)),
)
def test_another_kind_of_cache_is_refused(
    make_pair: Callable[..., Pair], change: dict[str, object]
) -> None:
    pair = make_pair(shape=replace(SHAPE, **change))  # type: ignore[arg-type]
    pair.read_prompt()
    assert reason(pair.fetch()) is ErrorReason.KV_INCOMPATIBLE
    pair.require_untouched()


def test_another_number_of_tokens_is_refused(pair: Pair) -> None:
    pair.read_prompt()
    fetched = pair.fetch(replace(pair.order(), num_tokens=NUM_TOKENS + 1))
    assert reason(fetched) is ErrorReason.KV_TRANSFER_FAILED
    pair.require_untouched()


def test_bytes_that_changed_on_the_way_are_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = frames.write

    def flip(*args: object) -> tuple[bytes, int]:
        message, checksum = write(*args)  # type: ignore[arg-type]
        altered = bytearray(message)
        altered[len(altered) // 2] ^= 1
        return bytes(altered), checksum

    monkeypatch.setattr(frames, "write", flip)
    hold = pair.read_prompt()
    assert reason(pair.fetch()) is ErrorReason.KV_TRANSFER_FAILED
    pair.require_untouched()
    assert eventually(lambda: hold.end, WITHIN_S) in (LeaseEnd.ABANDONED, LeaseEnd.FETCHED)


def test_blocks_that_were_left_out_are_missed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "rectangle", lambda shape: (2, NUM_LAYERS))
    hold = pair.read_prompt()
    monkeypatch.setattr(hold, "wait", lambda first, alive: 4 if first < 4 else first)
    assert reason(pair.fetch()) is ErrorReason.KV_TRANSFER_FAILED


def test_taking_blocks_back_ends_the_transfer(pair: Pair) -> None:
    pair.begin()
    pair.table.close("t", LeaseEnd.LOST)
    # From here on the blocks are another prompt's.
    assert reason(pair.ended()) is ErrorReason.KV_TRANSFER_FAILED


def test_a_cancelled_fetch_ends_at_once_and_frees_the_holder(pair: Pair) -> None:
    hold = pair.begin()
    pair.fetcher.cancel("request")
    assert reason(pair.ended(within_s=1)) is ErrorReason.KV_TRANSFER_FAILED
    assert eventually(lambda: hold.end, WITHIN_S) is LeaseEnd.ABANDONED


def test_a_prompt_that_is_read_anew_elsewhere_is_waited_for(pair: Pair) -> None:
    hold = pair.begin()
    hold.rewind()
    # Its old blocks are another prompt's from here on.
    for layer in pair.theirs.values():
        layer[[33, *HOLDER_BLOCKS[1:]]] = layer[HOLDER_BLOCKS]
        layer[HOLDER_BLOCKS[0]] = 0
    elsewhere = [33, *HOLDER_BLOCKS[1:]]
    hold.extend(elsewhere[:1], 1, lambda: None)
    hold.extend(elsewhere[1:], 7, lambda: None)
    assert pair.ended().failure is None
    for ours, theirs in zip(pair.ours.values(), pair.theirs.values(), strict=True):
        assert torch.equal(ours[READER_BLOCKS], theirs[elsewhere])


def test_a_reader_that_takes_nothing_is_turned_out_when_the_hold_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "LEAVE_S", 0.05)
    hold = pair.read_prompt()
    sending, left = threading.Event(), threading.Event()
    leave = hold.leave

    def write(*_: object) -> tuple[bytes, int]:
        sending.set()
        return bytes(2**26), 0  # more than any window

    def leaving(end: LeaseEnd) -> None:
        leave(end)
        left.set()

    monkeypatch.setattr(frames, "write", write)
    monkeypatch.setattr(hold, "leave", leaving)
    with grpc.insecure_channel(f"127.0.0.1:{pair.server.port}") as channel:
        fetch: Any = channel.unary_stream(FETCH, request_serializer=FetchRequest.SerializeToString)
        call = fetch(FetchRequest(transfer_id="t", epoch="epoch"))
        assert sending.wait(WITHIN_S)
        pair.table.close("t", LeaseEnd.EXPIRED)
        assert left.wait(WITHIN_S)
        call.cancel()


@pytest.mark.parametrize(
    "code",
    [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK],
    ids=lambda c: c.name,
)
def test_whatever_a_holder_says_is_a_failed_transfer(code: grpc.StatusCode) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        lambda _, context: context.abort(code, "no"), request_deserializer=FetchRequest.FromString
    )
    service, method = FETCH.strip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    fetcher = Fetcher(block_store(block_rows(cache(2), NUM_BLOCKS)), SHAPE, 0, None, 10)
    try:
        fetcher.start(Order("r", "t", "epoch", "127.0.0.1", [port], 70, 0, [1, 2, 3]))
        (fetched,) = eventually(fetcher.finished, WITHIN_S)
        assert reason(fetched) is ErrorReason.KV_TRANSFER_FAILED
    finally:
        fetcher.close()
        server.stop(0)


def test_a_holder_that_is_gone_fails_the_fetch(pair: Pair) -> None:
    pair.begin()
    pair.server.close()
    assert reason(pair.ended()) is ErrorReason.KV_TRANSFER_FAILED


def test_a_holder_that_sends_nothing_is_given_up(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(timeout_s=0.1)
    pair.admit()
    assert reason(pair.fetch()) is ErrorReason.KV_TRANSFER_FAILED


@pytest.mark.parametrize(
    ("bytes_per_block", "num_layers", "expected"),
    [
        (24_576, 30, (1, 30)),  # SmolLM2-135M: 0.7 MiB a block
        (24_576, 15, (2, 15)),
        (65_536, 32, (1, 16)),  # Llama-3.1-8B, blocks of 16 tokens: 2 MiB
        (65_536, 80, (1, 16)),  # Llama-3.1-70B: 5 MiB a block
        (4_194_304, 2, (1, 1)),
    ],
)
def test_parts_are_of_about_a_megabyte(
    bytes_per_block: int, num_layers: int, expected: tuple[int, int]
) -> None:
    shape = CacheShape(16, num_layers, bytes_per_block, "", "")
    assert rectangle(shape) == expected


def test_a_cache_whose_blocks_are_scattered_is_refused() -> None:
    tensor = torch.zeros(2, NUM_BLOCKS, 8).transpose(0, 1)
    with pytest.raises(ValueError, match=r"cannot serve the cache of layer\.0"):
        block_rows({"layer.0": tensor}, NUM_BLOCKS)


def test_rows_are_views_of_the_cache() -> None:
    caches = cache(1)
    rows = block_rows(caches, NUM_BLOCKS)
    given = np.arange(SHAPE.bytes_per_block, dtype=np.uint8)
    block_store(rows).scatter([5], range(1, 2), given.tobytes())
    assert caches["layer.1"][5].view(torch.uint8).flatten().tolist() == given.tolist()
