"""Prompts that a simulated engine holds for others, and the port where those come for them.

No bytes travel, but all else does: a reader asks for a transfer by its id and the epoch of the
process that gave it out, is told when the blocks are read, takes its time, and asks at its end
whether they were held until then. A holder whose blocks are not read yet says so again and
again, for one that is silent is taken for dead.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.clock import Clock
from pdserve.config import Listen
from pdserve.engine.sim_sockets import Listener, Sockets, Writer
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import LeaseEnd, SimDescriptor

_WAIT, _READ, _DONE, _HELD = b"wait\n", b"read\n", b"done\n", b"held\n"
_WAIT_S = 1.0
_REFUSALS = {
    reason.name.encode() + b"\n": (reason, message)
    for reason, message in (
        (ErrorReason.KV_FOREIGN, "the prefill worker never gave this KV handle out"),
        (ErrorReason.KV_STALE_EPOCH, "the prefill worker was restarted since it gave the handle"),
        (ErrorReason.KV_EXPIRED, "the KV lease ended before the blocks were fetched"),
        (ErrorReason.KV_REUSED, "the KV blocks were fetched before"),
        (ErrorReason.KV_TRANSFER_FAILED, "the prompt was not read to its end"),
    )
}
_MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Transfer:
    """`read` is set once the blocks are there; until then `num_tokens` is 0."""

    read: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    expiry: asyncio.Task[None] | None = None


class SimHolder:
    """Owns its port from `start` to `close`; `on_release` is called when blocks get free."""

    def __init__(
        self, clock: Clock, sockets: Sockets, listen: Listen, on_release: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._sockets = sockets
        self._listen = listen
        self._on_release = on_release
        self._epoch = secrets.token_hex(8)
        self._transfers: dict[str, _Transfer] = {}
        self._ended: dict[str, LeaseEnd] = {}
        # In order, as a set is not: a simulation's run must repeat.
        self._serving: dict[asyncio.Task[None], None] = {}
        self._listener: Listener | None = None
        self.num_tokens = 0

    async def start(self) -> None:
        self._listener = await self._sockets.listen(self._accept, self._listen)

    def admit(self, num_bytes: int, transport: str) -> SimDescriptor:
        """A transfer that can be asked for, and is waited for until `hold` or `release`."""
        assert self._listener is not None
        transfer_id = secrets.token_hex(8)
        self._transfers[transfer_id] = _Transfer()
        host, port = self._listener.host, self._listener.port
        return SimDescriptor(num_bytes, transport, transfer_id, self._epoch, host, port)

    def hold(self, descriptor: SimDescriptor, num_tokens: int, lease_s: float) -> None:
        """The prompt has been read: its blocks are held for `lease_s` seconds."""
        transfer = self._transfers[descriptor.transfer_id]
        transfer.num_tokens = num_tokens
        self.num_tokens += num_tokens
        transfer.read.set()
        self.renew(descriptor, lease_s)

    def renew(self, descriptor: SimDescriptor, lease_s: float) -> LeaseEnd | None:
        """Holds the blocks for `lease_s` seconds from now; how the transfer ended, if it did."""
        transfer = self._transfers.get(descriptor.transfer_id)
        if transfer is None:
            return self._ended.get(descriptor.transfer_id, LeaseEnd.RELEASED)
        if transfer.expiry is not None:
            transfer.expiry.cancel()
        expiring = self._expire(descriptor.transfer_id, lease_s)
        transfer.expiry = asyncio.create_task(expiring, name="sim lease")
        return None

    def release(self, descriptor: SimDescriptor) -> LeaseEnd:
        """Ends the transfer; how it had ended, if it had."""
        self._end(descriptor.transfer_id, LeaseEnd.RELEASED)
        return self._ended.get(descriptor.transfer_id, LeaseEnd.RELEASED)

    async def close(self) -> None:
        """Ends every transfer and breaks every connection; idempotent."""
        if self._listener is not None:
            self._listener.close()
        for transfer_id in tuple(self._transfers):
            self._end(transfer_id, LeaseEnd.LOST)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _expire(self, transfer_id: str, lease_s: float) -> None:
        await self._clock.sleep(lease_s)
        self._transfers[transfer_id].expiry = None
        self._end(transfer_id, LeaseEnd.EXPIRED)

    def _end(self, transfer_id: str, end: LeaseEnd) -> bool:
        """Whether it is ended by this."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return False
        if transfer.expiry is not None:
            transfer.expiry.cancel()
        self._ended[transfer_id] = end
        if len(self._ended) > _MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.num_tokens -= transfer.num_tokens
        transfer.read.set()
        self._on_release()
        return True

    def _accept(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            with suppress(ConnectionError):
                asked = (await reader.readline()).decode(errors="replace")
                epoch, _, transfer_id = asked.strip().partition(" ")
                writer.write(await self._found(epoch, transfer_id, writer))
                if await reader.readline() == _DONE:
                    held = self._end(transfer_id, LeaseEnd.FETCHED)
                    writer.write(_HELD if held else _refusal(ErrorReason.KV_EXPIRED))
                    await writer.drain()
        finally:
            writer.close()

    async def _found(self, epoch: str, transfer_id: str, writer: Writer) -> bytes:
        if epoch != self._epoch:
            return _refusal(ErrorReason.KV_STALE_EPOCH)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            end = self._ended.get(transfer_id)
            if end is None:
                return _refusal(ErrorReason.KV_FOREIGN)
            used = end is LeaseEnd.FETCHED
            return _refusal(ErrorReason.KV_REUSED if used else ErrorReason.KV_EXPIRED)
        while not transfer.read.is_set():
            try:
                async with asyncio.timeout(_WAIT_S):
                    await transfer.read.wait()
            except TimeoutError:
                writer.write(_WAIT)
        return _READ if transfer.num_tokens else _refusal(ErrorReason.KV_TRANSFER_FAILED)


async def fetch(
    sockets: Sockets, descriptor: SimDescriptor, transfer: Callable[[], Awaitable[None]]
) -> None:
    """Takes what the descriptor names from its holder, `transfer` being the way there.

    Raises DecodeError with the holder's reason, or KV_TRANSFER_FAILED where none answers.
    """
    try:
        async with asyncio.timeout(HOLDER_SILENCE_S):
            reader, writer = await sockets.connect(descriptor.host, descriptor.port)
    except OSError:
        raise _lost() from None
    try:
        writer.write(f"{descriptor.epoch} {descriptor.transfer_id}\n".encode())
        _expect(_READ, await _answer(reader))
        await transfer()
        writer.write(_DONE)
        _expect(_HELD, await _answer(reader))
    except OSError:
        raise _lost() from None
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Raises TimeoutError for a holder that is silent."""
    answer = _WAIT
    while answer == _WAIT:
        async with asyncio.timeout(HOLDER_SILENCE_S):
            answer = await reader.readline()
    return answer


def _refusal(reason: ErrorReason) -> bytes:
    return reason.name.encode() + b"\n"


def _expect(wanted: bytes, answer: bytes) -> None:
    if answer == wanted:
        return
    if answer not in _REFUSALS:
        raise _lost()
    raise DecodeError(*_REFUSALS[answer])


def _lost() -> DecodeError:
    return DecodeError(ErrorReason.KV_TRANSFER_FAILED, "the holder of the KV blocks was lost")
