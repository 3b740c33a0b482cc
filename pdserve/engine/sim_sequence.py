"""One sequence inside the simulated engine: its progress, and the hand-over to its reader."""

from __future__ import annotations

import asyncio

from pdserve.engine.sim_model import AnswerSource, logprobs_at
from pdserve.errors import DecodeError
from pdserve.types import Delta, EngineRequest, Usage


class SimSequence:
    """Owned by the engine, which sets the plain attributes; one task reads it by `next`.

    Without an answer it only reads its prompt. Times are on the engine's clock, `started` is
    negative until the engine begins; counts are in tokens: `computed` of the KV that is there,
    `held` of the capacity that is charged. `blocks` is there while the prompt's KV is to be
    fetched, and set once the sequence has blocks to fetch it into.
    """

    __slots__ = (
        "_answer",
        "_error",
        "_pending",
        "_waiter",
        "answered",
        "arrived",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "dropped",
        "held",
        "request",
        "started",
        "transfer_s",
    )

    def __init__(self, request: EngineRequest, answer: AnswerSource | None, arrived: float) -> None:
        self.request = request
        self.arrived = arrived
        self.started = -1.0
        self.transfer_s = 0.0
        self.computed = 0
        self.cached_tokens = 0
        self.held = 0
        self.answered = 0
        self.dropped = False
        self.chain: list[int] = []
        self.blocks: asyncio.Event | None = None
        self._answer = answer
        self._pending: Delta | None = None
        self._error: DecodeError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def writes(self) -> bool:
        return self._answer is not None

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer so far."""
        return len(self.request.token_ids) + self.answered

    @property
    def sure_tokens(self) -> int:
        """How many come before the sequence can end, the last one included; 1 before the first
        token, which its reader waits for."""
        if self._answer is None or not self.answered:
            return 1
        return self._answer.sure_tokens

    def advance(self, steps: int = 1) -> bool:
        """Makes the next tokens, or ends the prefill; True when the sequence is done.

        At most `sure_tokens` at once.
        """
        if self._answer is None:
            self._pending = Delta("")
            self._notify()
            return True
        made = [self._answer.next() for _ in range(steps)]
        self.answered += steps
        self.computed += steps
        delta = self._pending
        if delta is None:
            self._pending = delta = Delta("", [])
        finish = made[-1][2]
        for token, text, _ in made:
            delta.text += text
            delta.token_ids.append(token)
        if (top := self.request.sampling.logprobs) is not None:
            if delta.logprobs is None:
                delta.logprobs = []
            delta.logprobs += [logprobs_at(token, top) for token, _, _ in made]
        if finish is not None:
            delta.finish_reason = finish
            delta.stop_reason = self._answer.stop_reason
            delta.usage = Usage(len(self.request.token_ids), self.answered, self.cached_tokens)
        self._notify()
        return finish is not None

    def fail(self, error: DecodeError) -> None:
        """Raised to the reader, in place of anything it has not read yet."""
        self._error = error
        self._notify()

    async def next(self) -> Delta:
        """What came since the last call, waiting for it if nothing did.

        Raises the DecodeError of `fail`.
        """
        if self._pending is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        delta = self._pending
        assert delta is not None
        self._pending = None
        return delta

    def _notify(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
