"""Log probabilities as OpenAI's two APIs show them, in the very form of vLLM's own server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pdserve.sampling import PositionLogprobs, TokenLogprob

FLOOR = -9999.0
"""Stands for the impossible, which JSON has no number for."""


class LogprobsShape(Protocol):
    """Made for one answer with the number of likeliest tokens; is given its positions in order."""

    def __init__(self, top: int) -> None: ...

    def __call__(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]: ...


class ChatLogprobs:
    """`choices.logprobs` of chats."""

    def __init__(self, top: int) -> None:
        self._top = top

    def __call__(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_chat(position[0]),
                    "top_logprobs": [_chat(one) for one in position[: self._top]],
                }
                for position in positions
            ]
        }


class CompletionLogprobs:
    """`choices.logprobs` of completions; offsets go on from call to call. A token without a rank
    has no log probability: the first of an echoed prompt."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def __call__(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        offsets = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position[0].token)
        return {
            "text_offset": offsets,
            "token_logprobs": [
                _number(position[0]) if position[0].rank else None for position in positions
            ],
            "tokens": [position[0].token for position in positions],
            "top_logprobs": [
                {one.token: _number(one) for one in position[: self._top + 1]}
                if position[0].rank
                else None
                for position in positions
            ],
        }


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """As vLLM shows them, by token id; there are none of the first token."""
    return [
        None,
        *(
            {
                str(one.token_id): {
                    "logprob": _number(one),
                    "rank": one.rank,
                    "decoded_token": one.token,
                }
                for one in position
            }
            for position in positions
        ),
    ]


def _chat(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": _number(one), "bytes": list(one.token.encode())}


def _number(one: TokenLogprob) -> float:
    return max(one.logprob, FLOOR)
