"""What an answer showed, whichever way it was asked for, and how two of them compare. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LOGPROB_STEP = 0.15
"""Two runs in bfloat16 may differ by as much."""


@dataclass(frozen=True)
class Seen:
    """`refused` is the parameter that a 400 named; then the rest is empty.

    `logprobs` are those of the tokens shown, 0 where there is none. `token_ids` are those of the
    prompt and of the answer, where they were asked for. `mode` and `reason` are those of pdserve's
    headers. `calls` are names and arguments of the tools that are called, the latter as JSON
    however it was written.
    """

    text: str = ""
    finish_reason: str = ""
    usage: tuple[int, int] = (0, 0)
    logprobs: tuple[float, ...] = ()
    num_prompt_logprobs: int = 0
    mode: str = ""
    refused: str | None = None
    reason: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def fell_back(self) -> bool:
        """Whether it is the fleet's doing, and not the parameter's, that it was colocated."""
        return "fell back to colocated" in self.reason


class Verdict(StrEnum):
    EQUAL = "="
    NEAR_TIE = "≈"
    COLOCATED = "c"
    REFUSED = "400"
    DIFFERENT = "≠"
    NOT_THERE = "n/a"


def verdict(reference: Seen, seen: Seen, asked_mode: str, near_tie_at: int | None) -> Verdict:
    """`near_tie_at` is the first character of the reference from which on a near tie may part the
    texts; None without one."""
    if seen.refused is not None:
        return Verdict.REFUSED
    same = _same(reference, seen)
    if not same and near_tie_at is not None:
        same = seen.text[:near_tie_at] == reference.text[:near_tie_at]
        return Verdict.NEAR_TIE if same else Verdict.DIFFERENT
    if not same:
        return Verdict.DIFFERENT
    return Verdict.EQUAL if seen.mode == asked_mode else Verdict.COLOCATED


def _same(one: Seen, other: Seen) -> bool:
    return (
        (one.text, one.calls, one.finish_reason, one.usage, one.token_ids, one.num_prompt_logprobs)
        == (
            other.text,
            other.calls,
            other.finish_reason,
            other.usage,
            other.token_ids,
            other.num_prompt_logprobs,
        )
        and len(one.logprobs) == len(other.logprobs)
        and all(
            abs(a - b) <= LOGPROB_STEP for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
    )


def of_chosen(choices: list[dict[str, Any]], usage: dict[str, Any], took: tuple[str, str]) -> Seen:
    """Of the pieces of one choice, in order; a whole answer is one piece. `took` are mode and
    reason."""
    texts, calls, logprobs, token_ids, of_prompt = [], [], [], [], 0
    for choice in choices:
        content = choice.get("message") or choice.get("delta") or {}
        texts.append(choice.get("text") or content.get("content") or "")
        calls += [
            (call.get("index", index), call["function"])
            for index, call in enumerate(content.get("tool_calls") or ())
        ]
        shown = choice.get("logprobs") or {}
        logprobs += [one or 0.0 for one in shown.get("token_logprobs") or ()]
        logprobs += [one["logprob"] for one in shown.get("content") or ()]
        token_ids += choice.get("prompt_token_ids") or ()
        token_ids += choice.get("token_ids") or ()
        of_prompt += len(choice.get("prompt_logprobs") or ())
    return Seen(
        text="".join(texts),
        calls=calls_of(calls),
        finish_reason=choices[-1]["finish_reason"],
        usage=(usage["prompt_tokens"], usage["completion_tokens"]),
        logprobs=tuple(logprobs),
        token_ids=tuple(token_ids),
        num_prompt_logprobs=of_prompt,
        mode=took[0],
        reason=took[1],
    )


def calls_of(pieces: Sequence[tuple[int, Mapping[str, str | None]]]) -> tuple[tuple[str, str], ...]:
    """From what is new of the call of each index, in order."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for index, function in pieces:
        names[index] = names.get(index, "") + (function.get("name") or "")
        arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    return tuple((names[index], _as_written(arguments[index])) for index in sorted(names))


def _as_written(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return arguments


def near_tie(positions: list[dict[str, float] | None], tokens: list[str]) -> int | None:
    """Where the text may part, from completions' `top_logprobs` and `tokens` of a greedy run."""
    at = 0
    for top, token in zip(positions, tokens, strict=True):
        best = sorted((top or {}).values(), reverse=True)
        if len(best) > 1 and best[0] - best[1] <= LOGPROB_STEP:
            return at
        at += len(token)
    return None
