"""The NIXL side channel over real sockets: questions, answers, and bytes that are neither."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import zmq

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.engine.kv import lease, side_channel
from pdserve.engine.kv.lease import Lease, LeaseWatcher, Verdict
from pdserve.engine.kv.side_channel import HeldBlocks, SideChannel
from pdserve.errors import ConfigError, DecodeError, ErrorReason

BLOCKS = ((1, 2, 3),)
NOISE = [
    [b""],
    [b"", b""],
    [b"", b"\xc1"],
    [b"", b"\xff" * 1000],
    [b"", msgspec.msgpack.encode(None)],
    [b"", msgspec.msgpack.encode(7)],
    [b"", msgspec.msgpack.encode([])],
    [b"", msgspec.msgpack.encode([lease.QUESTION, "seven", None])],
    [b"", msgspec.msgpack.encode([lease.QUESTION, 1, "engine", "r", "blocks"])],
    [b"", msgspec.msgpack.encode([b"get_meta_msg", 99, 99])],
    [b"", msgspec.msgpack.encode([b"get_meta_msg", [], {}])],
    [b"", b"\x91" * 100_000 + b"\x01"],
    [b"", b"one", b"two"],
]


class Holder:
    def __init__(self) -> None:
        self.held = HeldBlocks("engine")
        self.channel = SideChannel(("127.0.0.1", 0), self.answer)
        self.address = ("127.0.0.1", self.channel.port)

    def answer(self, message: bytes) -> list[bytes]:
        kind, *_ = msgspec.msgpack.decode(message)
        if kind == lease.QUESTION:
            return [lease.answer(message, self.held.refusal)]
        raise KeyError((99, 99))

    def lease(self) -> Lease:
        return Lease(self.address, "engine", "r", BLOCKS)


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.channel.close()
    assert not made.channel.thread.is_alive()


@pytest.fixture
def watcher() -> Iterator[LeaseWatcher]:
    made = LeaseWatcher()
    yield made
    made.close()


def verdict(watcher: LeaseWatcher, asked: Lease) -> Verdict:
    """Of a read that has just ended."""
    watcher.begin("read", asked)
    watcher.read_ended("read")
    while (told := watcher.pump(0.05)["read"]) is Verdict.OPEN:
        pass  # a holder that says nothing is given up
    return told


def refusal(watcher: LeaseWatcher, asked: Lease) -> ErrorReason:
    assert verdict(watcher, asked) is Verdict.VOID
    reason = watcher.failure("read").reason
    watcher.end("read")
    return reason


def test_blocks_that_are_held_are_good(holder: Holder, watcher: LeaseWatcher) -> None:
    holder.held.hold("r", BLOCKS)
    assert verdict(watcher, holder.lease()) is Verdict.GOOD


def test_what_is_not_held_is_refused_and_told_why(holder: Holder, watcher: LeaseWatcher) -> None:
    holder.held.hold("r", BLOCKS)
    asked = holder.lease()
    assert refusal(watcher, replace(asked, request_id="s")) is ErrorReason.KV_FOREIGN
    assert refusal(watcher, replace(asked, blocks=((1, 2, 4),))) is ErrorReason.KV_FOREIGN
    assert refusal(watcher, replace(asked, engine_id="before")) is ErrorReason.KV_STALE_EPOCH
    holder.held.end("r")
    assert refusal(watcher, asked) is ErrorReason.KV_EXPIRED


def test_ends_are_remembered_for_a_while(
    holder: Holder, watcher: LeaseWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "REMEMBERED", 1)
    for request_id in "rs":
        holder.held.hold(request_id, BLOCKS)
        holder.held.end(request_id)
    assert refusal(watcher, holder.lease()) is ErrorReason.KV_FOREIGN
    assert refusal(watcher, replace(holder.lease(), request_id="s")) is ErrorReason.KV_EXPIRED


def test_a_holder_that_lives_answers_a_ping(holder: Holder) -> None:
    lease.ping(holder.address, "engine")


def test_another_engine_at_the_address_is_found_out_by_a_ping(holder: Holder) -> None:
    with pytest.raises(DecodeError) as caught:
        lease.ping(holder.address, "before")
    assert caught.value.reason is ErrorReason.KV_STALE_EPOCH


def test_a_port_where_nobody_listens_is_found_out_by_a_ping() -> None:
    gone = Holder()
    gone.channel.close()
    with pytest.raises(DecodeError) as caught:
        lease.ping(gone.address, "engine")
    assert caught.value.reason is ErrorReason.KV_TRANSFER_FAILED


@pytest.mark.parametrize("frames", NOISE, ids=range(len(NOISE)))
def test_bad_bytes_are_answered_with_nothing_and_counted(
    holder: Holder, watcher: LeaseWatcher, frames: list[bytes]
) -> None:
    holder.held.hold("r", BLOCKS)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(lease.endpoint(*holder.address))
        dealer.send_multipart(frames)
        assert dealer.poll(60_000)
        assert dealer.recv_multipart() == [b"", b""]
    assert holder.channel.unanswered == 1
    assert verdict(watcher, holder.lease()) is Verdict.GOOD


def test_bytes_that_are_not_zeromq_at_all_harm_nothing(
    holder: Holder, watcher: LeaseWatcher
) -> None:
    holder.held.hold("r", BLOCKS)
    with socket.create_connection(holder.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)
        assert verdict(watcher, holder.lease()) is Verdict.GOOD


def test_a_flood_of_bad_bytes_does_not_fill_the_log(
    holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(lease.endpoint(*holder.address))
        for _ in range(100):
            dealer.send_multipart([b"", b"\xc1"])
            assert dealer.poll(60_000)
            dealer.recv_multipart()
    assert holder.channel.unanswered == 100
    assert len([each for each in caplog.records if "side channel" in each.message]) == 7


@pytest.mark.parametrize("frames", [[b""], [b"", b""], [b"", b"\xc1"], [b"", b"\x90"]], ids=str)
def test_a_holder_that_sends_what_is_no_answer_is_silent(frames: list[bytes]) -> None:
    now = [0.0]
    watcher = LeaseWatcher(lambda: now[0])
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        watcher.begin("read", Lease(("127.0.0.1", port), "engine", "r", BLOCKS))
        watcher.read_ended("read")
        assert router.poll(60_000)
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, *frames])
        assert watcher.pump(0.1) == {"read": Verdict.OPEN}
        now[0] = HOLDER_SILENCE_S
        assert watcher.pump(0) == {"read": Verdict.VOID}
        assert watcher.failure("read").reason is ErrorReason.KV_TRANSFER_FAILED
    watcher.close()


def test_a_port_that_is_taken_is_an_error_in_words(holder: Holder) -> None:
    with pytest.raises(ConfigError, match="Address already in use"):
        SideChannel(holder.address, holder.answer)
