"""Scripts of what a fake worker does, stepped by gates and never by time, and what it answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Steps
from dataclasses import dataclass, field

from coordinator.sequence import Sequence
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.types import Delta, EngineRequest, FinishReason, FirstTokenTimings, Usage

ANSWER_TOKENS = 3
CACHED_AT_PREFILL = 2
PREFILL_S = 0.25
FIRST_STEP_S = 0.125
TRANSFER_S = 0.5


@dataclass(slots=True)
class Gate:
    """A point of a script: `reached` tells the test, `open` lets the script go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        self._opened.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._opened.wait()


Step = Gate | float | PdserveError | Delta
"""Something to wait at, seconds to take, something to fail with, or to say in an answer."""

Script = Steps[Step]
"""What happens to one call before it succeeds of itself."""


def answer(request: EngineRequest, *, handed_over: bool = False) -> list[Delta]:
    """What every worker answers, one delta each step: each token depends on those before.

    As engines do, a decode worker takes handed-over blocks for hits of its own cache, and
    gives out nothing of what it replays.
    """
    tokens = list(request.replay.token_ids if request.replay else ())
    replayed = len(tokens)
    while len(tokens) < min(ANSWER_TOKENS, request.sampling.max_tokens or ANSWER_TOKENS):
        tokens.append((sum(request.token_ids) + sum(tokens)) % 10_007)
    deltas = [Delta(f"t{token} ", [token]) for token in tokens[replayed:]]
    transfer_s = TRANSFER_S if handed_over else 0.0
    deltas[0].timings = FirstTokenTimings(transfer_s, FIRST_STEP_S, transfer_s)
    prompt_tokens = len(request.token_ids)
    deltas[-1].finish_reason = FinishReason.LENGTH
    deltas[-1].usage = Usage(prompt_tokens, len(tokens), prompt_tokens - 1 if handed_over else 0)
    return deltas


def first_delta(text: str = "first ") -> Delta:
    """A delta that may begin an answer and does not end it."""
    return Delta(text, [7], timings=FirstTokenTimings(0.0, FIRST_STEP_S))


def next_of(scripts: deque[Script]) -> Script:
    return scripts.popleft() if scripts else ()


async def play(script: Script, sequence: Sequence | None = None) -> None:
    for step in script:
        match step:
            case Gate():
                await step.passed()
            case float():
                await asyncio.sleep(step)
            case PdserveError():
                raise step
            case Delta():
                assert sequence is not None, "only an answer says something"
                sequence.push(step)
                await asyncio.sleep(0)


def lost() -> DecodeError:
    return DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")


def prefill_error(reason: ErrorReason = ErrorReason.PREFILL_FAILED) -> PrefillError:
    return PrefillError(reason, "the reader broke")


def decode_error(reason: ErrorReason = ErrorReason.DECODE_FAILED) -> DecodeError:
    return DecodeError(reason, "the writer broke")
