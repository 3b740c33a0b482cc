"""What a session sends: whole steps, merged where the reader is slow."""

from __future__ import annotations

import asyncio

from decode_svc.outgoing import Outgoing
from pdserve import convert
from pdserve.errors import ErrorReason
from pdserve.types import Delta, Failure, FinishReason, FirstTokenTimings, Usage
from pdserve.v1 import decode_pb2

FAILURE = Failure(ErrorReason.DECODE_FAILED, "lost")


async def message_of(outgoing: Outgoing) -> decode_pb2.SessionResponse:
    message = await outgoing.next_message()
    assert message is not None
    return message


async def test_what_is_added_in_one_iteration_leaves_in_one_message() -> None:
    outgoing = Outgoing()
    reading = asyncio.create_task(message_of(outgoing))
    await asyncio.sleep(0)
    for sequence_id in range(256):
        outgoing.add(sequence_id, Delta("x", [sequence_id]))
    message = await reading
    assert list(message.tokens.sequence_ids) == list(range(256))
    assert list(message.tokens.token_ids) == list(range(256))
    assert list(message.tokens.texts) == ["x"] * 256
    assert not message.deltas


async def test_only_single_tokens_of_sequences_that_go_on_travel_in_columns() -> None:
    outgoing = Outgoing()
    outgoing.add(1, Delta("a", [1], timings=FirstTokenTimings(0.0, 0.0)))
    outgoing.add(2, Delta("b", [2]))
    outgoing.add(3, Delta("cd", [3, 4]))
    outgoing.add(4, Delta("e", [5], FinishReason.STOP, Usage(5, 4, 0)))
    outgoing.add(5, Delta("f", [6]))
    outgoing.fail(5, FAILURE)
    message = await message_of(outgoing)
    assert list(message.tokens.sequence_ids) == [2]
    assert [delta.sequence_id for delta in message.deltas] == [1, 3, 4, 5]


async def test_deltas_of_a_sequence_that_wait_are_merged() -> None:
    outgoing = Outgoing()
    first = Delta("a", [1])
    outgoing.add(1, first)
    outgoing.add(1, Delta("b", [2, 3]))
    outgoing.add(1, Delta("c", [4], FinishReason.STOP, Usage(5, 4, 0)))
    message = await message_of(outgoing)
    (delta,) = message.deltas
    assert (delta.text, list(delta.token_ids)) == ("abc", [1, 2, 3, 4])
    assert convert.delta_from_proto(delta).finish_reason is FinishReason.STOP
    assert delta.usage.completion_tokens == 4


async def test_a_failure_keeps_the_tokens_before_it() -> None:
    outgoing = Outgoing()
    outgoing.add(1, Delta("a", [1]))
    outgoing.fail(1, FAILURE)
    outgoing.fail(2, FAILURE)
    message = await message_of(outgoing)
    one, two = message.deltas
    assert (one.sequence_id, one.text) == (1, "a")
    assert (two.sequence_id, two.text) == (2, "")
    assert convert.failure_from_proto(one.failure) == FAILURE
    assert convert.failure_from_proto(two.failure) == FAILURE


async def test_reservations_are_answered() -> None:
    outgoing = Outgoing()
    outgoing.answer_reservation(1, None)
    outgoing.answer_reservation(2, FAILURE)
    granted, refused = (await message_of(outgoing)).reservations
    assert not granted.HasField("failure")
    assert convert.failure_from_proto(refused.failure) == FAILURE


async def test_nothing_of_a_forgotten_sequence_is_sent() -> None:
    outgoing = Outgoing()
    outgoing.add(1, Delta("a", [1]))
    outgoing.fail(1, FAILURE)
    outgoing.answer_reservation(1, None)
    outgoing.add(2, Delta("b", [2]))
    outgoing.forget(1)
    message = await message_of(outgoing)
    assert list(message.tokens.sequence_ids) == [2]
    assert not message.deltas
    assert not message.reservations


async def test_what_was_added_is_sent_before_the_end() -> None:
    outgoing = Outgoing()
    outgoing.add(1, Delta("a", [1]))
    outgoing.close()
    await message_of(outgoing)
    assert await outgoing.next_message() is None


async def test_closing_ends_a_wait() -> None:
    outgoing = Outgoing()
    reading = asyncio.create_task(outgoing.next_message())
    await asyncio.sleep(0)
    outgoing.close()
    assert await reading is None
