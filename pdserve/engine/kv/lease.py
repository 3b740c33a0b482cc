"""A question of the decode engine to the prefill engine: do you still hold these blocks?

NIXL reads whatever lies in the blocks of another process; nothing in vLLM 0.32 tells the
reader when their holder has given them to another prompt meanwhile. So the reader asks after
its read: the answer yes proves that the blocks were held until then. The same question,
asked while a read is under way, tells a slow holder from a dead one.

It travels on the NIXL side channel (ZeroMQ, msgpack), beside vLLM's own handshake.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import zmq

QUESTION = b"pdserve_lease"
ASK_EVERY_S = 1.0
"""How often the holder is asked while a read is under way."""
SILENCE_S = 3.0
"""A holder that has not answered for this long is taken for dead."""
PING_S = 2.0
"""How long the first contact with a holder may take."""

BlockGroups = tuple[tuple[int, ...], ...]
Address = tuple[str, int]


class Ask(msgspec.Struct, array_like=True):
    """Whether `request_id` still holds exactly `blocks`; `number` comes back in the answer."""

    kind: bytes
    number: int
    request_id: str
    blocks: BlockGroups


class Answer(msgspec.Struct, array_like=True):
    number: int
    held: bool


_ENCODER = msgspec.msgpack.Encoder()
_ASKS = msgspec.msgpack.Decoder(Ask)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def block_groups(groups: object) -> BlockGroups:
    """Block numbers as vLLM hands them about (lists, tuples, numpy) in one comparable form."""
    return tuple(tuple(int(block) for block in group) for group in groups)  # type: ignore[attr-defined]


def answer(question: bytes, held: Callable[[str, BlockGroups], bool]) -> bytes:
    """The holder's answer to an encoded `Ask`."""
    ask = _ASKS.decode(question)
    return _ENCODER.encode(Answer(ask.number, held(ask.request_id, ask.blocks)))


def ping(address: Address) -> None:
    """Raises ConnectionError unless a holder listens at `address` and answers within PING_S.

    ZeroMQ alone would wait for a port where nobody listens as long as for a slow answer.
    """
    host, port = address
    try:
        socket.create_connection((host, port), PING_S).close()
    except OSError as error:
        raise ConnectionError(f"prefill engine is not reachable: {error}") from error
    with _dealer(zmq.Context.instance(), address) as dealer:
        dealer.send_multipart([b"", _ENCODER.encode(Ask(QUESTION, 0, "", ()))])
        if not dealer.poll(int(PING_S * 1000)):
            raise ConnectionError("prefill engine does not answer")


class Verdict(Enum):
    """What is known of a read: nothing yet, blocks were held to its end, or it is void."""

    OPEN = "open"
    GOOD = "good"
    VOID = "void"


@dataclass(slots=True)
class _Watch:
    address: Address
    request_id: str
    blocks: BlockGroups
    asked_at: float
    unanswered_since: float | None = None
    final: int | None = None
    verdict: Verdict = Verdict.OPEN
    numbers: set[int] = field(default_factory=set)


class LeaseWatcher:
    """The reader's side: watches the leases of the reads of one process. Not thread-safe.

    Call `pump` often: it sends, receives, and never waits longer than it is told.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._dealers: dict[Address, zmq.Socket[bytes]] = {}
        self._watches: dict[str, _Watch] = {}
        self._by_number: dict[int, str] = {}
        self._last_number = 0

    def begin(self, key: str, address: Address, request_id: str, blocks: BlockGroups) -> None:
        """A read began: of `blocks`, which `request_id` holds at `address`."""
        if key not in self._watches:
            self._watches[key] = _Watch(address, request_id, blocks, self._clock())

    def watches(self, key: str) -> bool:
        return key in self._watches

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
            if silent_since is not None and self._clock() - silent_since >= SILENCE_S:
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
        dealer = self._dealers.get(watch.address)
        if dealer is None:
            dealer = _connect(self._context, watch.address)
            self._dealers[watch.address] = dealer
        question = _ENCODER.encode(Ask(QUESTION, number, watch.request_id, watch.blocks))
        # A full pipe means that the holder has not answered for long: silence says so.
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([b"", question], zmq.NOBLOCK)
        return number

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        for dealer in self._dealers.values():
            poller.register(dealer, zmq.POLLIN)
        poller.poll(max(1, int(seconds * 1000)))

    def _receive(self) -> None:
        for dealer in self._dealers.values():
            while dealer.poll(0):
                reply = _ANSWERS.decode(dealer.recv_multipart()[-1])
                self._take(reply)

    def _take(self, reply: Answer) -> None:
        watch = self._watches.get(self._by_number.pop(reply.number, ""))
        if watch is None:
            return  # asked for a read that has ended since
        watch.numbers.discard(reply.number)
        watch.unanswered_since = None
        if not reply.held:
            watch.verdict = Verdict.VOID
        elif reply.number == watch.final:
            watch.verdict = Verdict.GOOD


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
