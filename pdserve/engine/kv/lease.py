"""A question of the decode engine to the prefill engine: do you still hold these blocks?

NIXL reads whatever lies in the blocks of another process; nothing in vLLM 0.32 tells the
reader when their holder has given them to another prompt meanwhile. So the reader asks after
its read: the answer yes proves that the blocks were held until then. The same question,
asked while a read is under way, tells a slow holder from a dead one.

It travels on the NIXL side channel (ZeroMQ, msgpack), beside vLLM's own handshake.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import zmq

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.engine.kv.connections import Connections
from pdserve.errors import DecodeError, ErrorReason

QUESTION = b"pdserve_lease"
ASK_EVERY_S = 1.0
"""How often the holder is asked while a read is under way."""
BlockGroups = tuple[tuple[int, ...], ...]
Address = tuple[str, int]

_REFUSALS = {
    reason.name: (reason, message)
    for reason, message in (
        (ErrorReason.KV_FOREIGN, "the prefill engine never held such KV blocks"),
        (ErrorReason.KV_EXPIRED, "the lease on the KV blocks has ended"),
        (ErrorReason.KV_STALE_EPOCH, "the prefill engine was restarted meanwhile"),
    )
}


class Ask(msgspec.Struct, array_like=True):
    """Whether `request_id` of the engine still holds exactly `blocks`; `number` comes back in
    the answer."""

    kind: bytes
    number: int
    engine_id: str
    request_id: str
    blocks: BlockGroups


class Answer(msgspec.Struct, array_like=True):
    """`refusal` is the name of an ErrorReason; empty where the blocks are held."""

    number: int
    refusal: str


_logger = logging.getLogger(f"vllm.{__name__}")

_ENCODER = msgspec.msgpack.Encoder()
_ASKS = msgspec.msgpack.Decoder(Ask)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def block_groups(groups: object) -> BlockGroups:
    """Block numbers as vLLM hands them about (lists, tuples, numpy) in one comparable form."""
    return tuple(tuple(int(block) for block in group) for group in groups)  # type: ignore[attr-defined]


def answer(question: bytes, refusal: Callable[[Ask], ErrorReason | None]) -> bytes:
    """The holder's answer to an encoded `Ask`. Raises msgspec.DecodeError for anything else."""
    ask = _ASKS.decode(question)
    reason = refusal(ask)
    return _ENCODER.encode(Answer(ask.number, "" if reason is None else reason.name))


def failure(refusal: str) -> DecodeError:
    """What a holder's refusal means for the request that its blocks were for."""
    reason = _REFUSALS.get(refusal)
    if reason is None:
        return DecodeError(ErrorReason.KV_TRANSFER_FAILED, "the prefill engine is silent")
    return DecodeError(*reason)


def ping(address: Address, engine_id: str) -> None:
    """Raises DecodeError unless this engine listens at `address` and answers: KV_STALE_EPOCH for
    another one there.

    ZeroMQ alone would wait for a port where nobody listens as long as for a slow answer.
    """
    host, port = address
    try:
        socket.create_connection((host, port), HOLDER_SILENCE_S).close()
    except OSError as error:
        raise DecodeError(
            ErrorReason.KV_TRANSFER_FAILED, "the prefill engine is not reachable"
        ) from error
    with _dealer(zmq.Context.instance(), address) as dealer:
        dealer.send_multipart([b"", _ENCODER.encode(Ask(QUESTION, 0, engine_id, "", ()))])
        if not dealer.poll(int(HOLDER_SILENCE_S * 1000)):
            raise failure("")
        reply = _answer_in(dealer.recv_multipart())
    if reply is not None and reply.refusal == ErrorReason.KV_STALE_EPOCH.name:
        raise failure(reply.refusal)


class Verdict(Enum):
    """What is known of a read: nothing yet, blocks were held to its end, or it is void."""

    OPEN = "open"
    GOOD = "good"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Lease:
    """What a handle says: these blocks are held by a request of an engine."""

    address: Address
    engine_id: str
    request_id: str
    blocks: BlockGroups


@dataclass(slots=True)
class _Watch:
    lease: Lease
    asked_at: float
    unanswered_since: float | None = None
    final: int | None = None
    verdict: Verdict = Verdict.OPEN
    refusal: str = ""
    numbers: set[int] = field(default_factory=set)


class LeaseWatcher:
    """The reader's side: watches the leases of the reads of one process. Not thread-safe.

    Call `pump` often: it sends, receives, and never waits longer than it is told.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._dealers: Connections[Address, zmq.Socket[bytes]] = Connections(
            lambda address: _connect(self._context, address), lambda dealer: dealer.close()
        )
        self._watches: dict[str, _Watch] = {}
        self._by_number: dict[int, str] = {}
        self._last_number = 0

    def begin(self, key: str, lease: Lease) -> None:
        """A read of blocks on lease began."""
        if key not in self._watches:
            self._watches[key] = _Watch(lease, self._clock())

    def watches(self, key: str) -> bool:
        return key in self._watches

    def failure(self, key: str) -> DecodeError:
        """Why a read is void."""
        return failure(self._watches[key].refusal)

    def read_ended(self, key: str) -> None:
        """The read's bytes have all arrived: only an answer to a question from now on counts."""
        watch = self._watches[key]
        if watch.final is None:
            watch.final = self._ask(key, watch)

    def end(self, key: str) -> None:
        watch = self._watches.pop(key, None)
        for number in watch.numbers if watch else ():
            self._by_number.pop(number, None)

    def pump(self, wait_s: float) -> dict[str, Verdict]:
        """Asks what is due, takes the answers of at most `wait_s` seconds, says where all stand.

        A watch stays until `end`.
        """
        now = self._clock()
        for key, watch in self._watches.items():
            if watch.final is None and now - watch.asked_at >= ASK_EVERY_S:
                self._ask(key, watch)
        deadline = time.monotonic() + wait_s
        self._receive()
        while self._awaits_final() and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            self._receive()
        for watch in self._watches.values():
            silent_since = watch.unanswered_since
            if silent_since is not None and self._clock() - silent_since >= HOLDER_SILENCE_S:
                watch.verdict = Verdict.VOID
        return {key: watch.verdict for key, watch in self._watches.items()}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _awaits_final(self) -> bool:
        return any(
            watch.final is not None and watch.verdict is Verdict.OPEN
            for watch in self._watches.values()
        )

    def _ask(self, key: str, watch: _Watch) -> int:
        self._last_number += 1
        number = self._last_number
        self._by_number[number] = key
        watch.numbers.add(number)
        watch.asked_at = self._clock()
        if watch.unanswered_since is None:
            watch.unanswered_since = watch.asked_at
        lease = watch.lease
        in_use = {other.lease.address for other in self._watches.values()}
        dealer = self._dealers.to(lease.address, in_use)
        question = _ENCODER.encode(
            Ask(QUESTION, number, lease.engine_id, lease.request_id, lease.blocks)
        )
        # A full pipe means that the holder has not answered for long: silence says so.
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([b"", question], zmq.NOBLOCK)
        return number

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        for dealer in self._dealers:
            poller.register(dealer, zmq.POLLIN)
        poller.poll(max(1, int(seconds * 1000)))

    def _receive(self) -> None:
        for dealer in self._dealers:
            while dealer.poll(0):
                reply = _answer_in(dealer.recv_multipart())
                if reply is not None:
                    self._take(reply)

    def _take(self, reply: Answer) -> None:
        watch = self._watches.get(self._by_number.pop(reply.number, ""))
        if watch is None:
            return  # asked for a read that has ended since
        watch.numbers.discard(reply.number)
        watch.unanswered_since = None
        if reply.refusal:
            watch.refusal = reply.refusal
            watch.verdict = Verdict.VOID
        elif reply.number == watch.final:
            watch.verdict = Verdict.GOOD


def _answer_in(frames: list[bytes]) -> Answer | None:
    """None for a message that is none: whoever sends no answer is silent."""
    try:
        return _ANSWERS.decode(frames[-1])
    except msgspec.DecodeError as error:
        _logger.warning("a prefill engine sent what is no answer: %s", error)
        return None


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: Address) -> zmq.Socket[bytes]:
    host, port = address
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    dealer.connect(endpoint(host, port))
    return dealer


@contextlib.contextmanager
def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: Address
) -> Iterator[zmq.Socket[bytes]]:
    dealer = _connect(context, address)
    try:
        yield dealer
    finally:
        dealer.close()


def endpoint(host: str, port: int) -> str:
    """The ZeroMQ name of a TCP address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
