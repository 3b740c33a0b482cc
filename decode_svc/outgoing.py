"""What a session is about to send: everything that came since its last message."""

from __future__ import annotations

import asyncio

from pdserve import convert
from pdserve.types import Delta, Failure
from pdserve.v1 import decode_pb2


class Outgoing:
    """Collects deltas, ends and reservations, and hands them out as one message.

    All sequences of an engine step are heard in one iteration of the event loop, and the
    writer wakes in the next: so a message carries a whole step. While a message is being
    written, further deltas of a sequence are merged; the backlog of a slow coordinator is
    bounded by the number of its sequences.
    """

    def __init__(self) -> None:
        self._deltas: dict[int, Delta] = {}
        self._failures: dict[int, Failure] = {}
        self._reservations: dict[int, Failure | None] = {}
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def add(self, sequence_id: int, delta: Delta) -> None:
        """Takes the delta over, merging it into one that still waits."""
        waiting = self._deltas.get(sequence_id)
        if waiting is None:
            self._deltas[sequence_id] = delta
            self._wake()
        else:
            waiting.extend(delta)

    def fail(self, sequence_id: int, failure: Failure) -> None:
        self._failures[sequence_id] = failure
        self._wake()

    def answer_reservation(self, sequence_id: int, failure: Failure | None) -> None:
        self._reservations[sequence_id] = failure
        self._wake()

    def forget(self, sequence_id: int) -> None:
        """Drops what has not been sent of a sequence."""
        self._deltas.pop(sequence_id, None)
        self._failures.pop(sequence_id, None)
        self._reservations.pop(sequence_id, None)

    def close(self) -> None:
        """Ends the messages, once all that was added has been handed out."""
        self._closed = True
        self._wake()

    async def next_message(self) -> decode_pb2.SessionResponse | None:
        """Everything since the last call, waiting for something; None after `close`."""
        while not (self._deltas or self._failures or self._reservations):
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        columns = self._columns()
        # A failure follows its sequence's last tokens in the same delta.
        deltas = [convert.delta_to_proto(*item) for item in self._deltas.items()]
        if self._failures:
            deltas = self._with_failures(deltas)
        message = decode_pb2.SessionResponse(
            deltas=deltas,
            tokens=columns,
            reservations=[
                decode_pb2.Reservation(
                    sequence_id=sequence_id,
                    failure=None if failure is None else convert.failure_to_proto(failure),
                )
                for sequence_id, failure in self._reservations.items()
            ],
        )
        self._deltas.clear()
        self._failures.clear()
        self._reservations.clear()
        return message

    def _columns(self) -> decode_pb2.TokenColumns | None:
        """Takes out of the deltas those that are one token and nothing else."""
        plain = [
            sequence_id
            for sequence_id, delta in self._deltas.items()
            if delta.is_plain and sequence_id not in self._failures
        ]
        if not plain:
            return None
        deltas = [self._deltas.pop(sequence_id) for sequence_id in plain]
        return decode_pb2.TokenColumns(
            sequence_ids=plain,
            token_ids=[delta.token_ids[0] for delta in deltas],
            texts=[delta.text for delta in deltas],
        )

    def _with_failures(
        self, deltas: list[decode_pb2.SequenceDelta]
    ) -> list[decode_pb2.SequenceDelta]:
        by_id = {delta.sequence_id: delta for delta in deltas}
        for sequence_id, failure in self._failures.items():
            delta = by_id.setdefault(sequence_id, decode_pb2.SequenceDelta(sequence_id=sequence_id))
            delta.failure.CopyFrom(convert.failure_to_proto(failure))
        return list(by_id.values())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
