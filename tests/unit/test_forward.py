"""The short way of text past a reader that waits: in order, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.sequence import Sequence
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import Delta, FinishReason


def bring(sequence: Sequence, text: str) -> None:
    """As a session does with a delta that has nothing but text and tokens."""
    if sequence.take is None or not sequence.take(text, 0.0):
        sequence.push(Delta(text))


async def waiting(sequence: Sequence) -> asyncio.Task[Delta]:
    reader = asyncio.create_task(sequence.next())
    await asyncio.sleep(0)
    return reader


async def test_text_goes_to_take_while_the_reader_waits() -> None:
    sequence = Sequence(1)
    taken: list[str] = []
    sequence.forward(lambda text, _: not taken.append(text))
    reader = await waiting(sequence)
    bring(sequence, "a")
    bring(sequence, "b")
    assert taken == ["a", "b"]
    assert not reader.done()
    sequence.push(Delta("c", finish_reason=FinishReason.STOP))
    assert (await reader).text == "c"


async def test_a_reader_that_is_busy_gets_everything_in_order() -> None:
    sequence = Sequence(1)
    taken: list[str] = []
    sequence.forward(lambda text, _: not taken.append(text))
    bring(sequence, "a")  # nobody waits
    assert (await sequence.next()).text == "a"
    reader = await waiting(sequence)
    sequence.push(Delta("b"))
    bring(sequence, "c")  # it has been woken, and has not taken "b" yet
    assert (await reader).text == "bc"
    assert taken == []


async def test_text_that_is_not_taken_wakes_the_reader() -> None:
    sequence = Sequence(1)
    sequence.forward(lambda text, _: text != "b")
    reader = await waiting(sequence)
    bring(sequence, "a")
    bring(sequence, "b")
    bring(sequence, "c")
    assert (await reader).text == "bc"


async def test_nothing_is_taken_after_a_failure() -> None:
    sequence = Sequence(1)
    taken: list[str] = []
    sequence.forward(lambda text, _: not taken.append(text))
    reader = await waiting(sequence)
    sequence.fail(DecodeError(ErrorReason.DECODE_FAILED, "lost"))
    bring(sequence, "late")
    assert taken == []
    assert (await reader).text == "late"
    with pytest.raises(DecodeError, match="lost"):
        await sequence.next()
