"""The language model of the simulated engine: pure, no clock, no weights.

Each token is a function of the tokens before it (and of the seed, when sampling), as with a
real model at temperature 0: it depends on the adapter, not on route, salt or timing, and a prompt
extended by part of its answer is answered with the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from math import log
from typing import Protocol

from pdserve.cached_blocks import CachedBlocks
from pdserve.errors import DecodeError, ErrorReason
from pdserve.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from pdserve.types import FinishReason

_COMMON = (
    "the of and to in is it that was for on are as with his they at be this have from or had "
    "by not word but what some we can out other were all there when up use your how said an "
    "each she which do their time if will way about many then them write would like so these "
    "her long make thing see him two has look more day could go come did number sound no most "
    "people my over know water than call first who may down side been now find any new work"
)
WORDS = tuple(_COMMON.split())
EOS = 0
BLOCK_SIZE = 32

_NUM_WORDS = len(WORDS)
_NUM_TOKENS = _NUM_WORDS + 1
_LN_2 = log(2)
_TEXTS = ("", *(f" {word}" for word in WORDS))
_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005
_EOS_ONE_IN = 256


def _absorb(state: int, token: int) -> int:
    return (state * _MULTIPLIER + token + 0x9E3779B97F4A7C15) & _MASK


class AnswerSource(Protocol):
    """What makes one answer. `sure_tokens` are those that will come before it can end, the last
    one included: at least 1; `stop_reason` is as in Delta."""

    @property
    def sure_tokens(self) -> int: ...

    @property
    def stop_reason(self) -> str | int | None: ...

    def next(self) -> tuple[int, str, FinishReason | None]:
        """The next token, the text that may be handed out now, and the end if it is one."""
        ...


class Answer:
    """Makes the answer to one prompt token by token, and ends it after `max_tokens` at most.

    It begins with the tokens of `replay`, whatever would have come.

    Stop strings are met as vLLM meets them: looked for in the text of the new token after
    `min_tokens`, the first of the list wins, nothing of it is ever handed out; text that could
    still become part of one is held back until the end.

    Of `logit_bias`, the greatest above 0 makes its token every one of the answer; tokens with one
    below 0 are passed over for the next of the vocabulary.
    """

    __slots__ = (
        "_banned",
        "_forced",
        "_held_chars",
        "_ignore_eos",
        "_max_tokens",
        "_min_tokens",
        "_replay",
        "_seed",
        "_sent_chars",
        "_state",
        "_stop",
        "_stop_token_ids",
        "_text",
        "_with_stop",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        replay: tuple[int, ...] = (),
        lora: str = "",
    ) -> None:
        """Raises ValueError for a `replay` that is not of this vocabulary."""
        if any(not 0 <= token < len(_TEXTS) for token in replay):
            raise ValueError("tokens to replay that there are none of")
        self._replay = replay
        self._state = 0
        for token in (*lora.encode(), *prompt):
            self._state = _absorb(self._state, token)
        sampled = sampling.temperature > 0 and sampling.seed is not None
        self._seed = _absorb(1, sampling.seed or 0) if sampled else 0
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self._ignore_eos = sampling.ignore_eos
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stop = sampling.stop
        self._banned = frozenset(token for token, bias in sampling.logit_bias if bias < 0)
        wanted = [(bias, token) for token, bias in sampling.logit_bias if bias > 0]
        self._forced = max(wanted)[1] % _NUM_TOKENS if wanted else None
        self._with_stop = sampling.include_stop_str_in_output
        self.stop_reason: str | int | None = None
        self._held_chars = (
            0 if self._with_stop else max((len(stop) for stop in self._stop), default=1) - 1
        )
        self._text = ""
        self._sent_chars = 0
        self.num_tokens = 0

    @property
    def sure_tokens(self) -> int:
        return 1

    def next(self) -> tuple[int, str, FinishReason | None]:
        # The high bits of the state are the well-mixed ones.
        mixed = (self._state ^ self._seed) * _MULTIPLIER & _MASK
        token = 1 + (mixed >> 40) % _NUM_WORDS
        self.num_tokens += 1
        forced = self.num_tokens <= self._min_tokens
        if not forced and (mixed >> 32) % _EOS_ONE_IN == 0:
            token = EOS
        if self.num_tokens <= len(self._replay):
            token = self._replay[self.num_tokens - 1]
        elif self._forced is not None:
            token = self._forced
        elif self._banned:
            token = self._allowed(token)
        self._state = _absorb(self._state, token)
        finish: FinishReason | None = None
        if not forced and (
            (token == EOS and not self._ignore_eos) or token in self._stop_token_ids
        ):
            finish = FinishReason.STOP
            if token in self._stop_token_ids:
                self.stop_reason = token
        elif self.num_tokens >= self._max_tokens:
            finish = FinishReason.LENGTH
        # A token that ends the answer has no part in its text.
        text = "" if finish is FinishReason.STOP and not self._with_stop else _TEXTS[token]
        if self._stop:
            text, finish = self._hold_back(text, finish)
        return token, text, finish

    def _allowed(self, token: int) -> int:
        """The token, or the first after it that is not banned."""
        for ahead in range(_NUM_TOKENS):
            if (candidate := (token + ahead) % _NUM_TOKENS) not in self._banned:
                return candidate
        return token

    def _hold_back(self, new: str, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        self._text += new
        if new and self.num_tokens > self._min_tokens:
            for stop in self._stop:
                start = self._text.find(stop, max(0, len(self._text) - len(new) - len(stop) + 1))
                if start >= 0:
                    self._text = self._text[: start + len(stop) * self._with_stop]
                    finish = FinishReason.STOP
                    self.stop_reason = stop
                    break
        held = 0 if finish else self._held_chars
        safe = max(self._sent_chars, len(self._text) - held)
        text = self._text[self._sent_chars : safe]
        self._sent_chars = safe
        return text, finish


def logprobs_at(token: int, top: int) -> PositionLogprobs:
    """The token has one chance in two, the next of the vocabulary one in four, and so on."""
    return tuple(
        TokenLogprob(
            token_id=(token + ahead) % _NUM_TOKENS if ahead else token,
            logprob=-(ahead + 1) * _LN_2,
            token=_TEXTS[(token + ahead) % _NUM_TOKENS],
            rank=ahead + 1,
        )
        for ahead in range(max(top, 1))
    )


class Filler:
    """An answer that only takes its time: `num_tokens` tokens, each a full stop."""

    __slots__ = ("stop_reason", "sure_tokens")

    def __init__(self, num_tokens: int) -> None:
        self.sure_tokens = num_tokens
        self.stop_reason: str | int | None = None

    def next(self) -> tuple[int, str, FinishReason | None]:
        self.sure_tokens -= 1
        return 1, ".", None if self.sure_tokens else FinishReason.LENGTH


class PrefixCache:
    """Which blocks of 32 prompt tokens were read before; the least recently used go first, and
    of one prompt the last ones. `told` has them for others to know."""

    def __init__(self, capacity_tokens: int) -> None:
        self.told = CachedBlocks()
        self._capacity = capacity_tokens // BLOCK_SIZE
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def lookup(self, chain: list[int], num_tokens: int) -> int:
        """Leading tokens found; never all `num_tokens`, for the last must be computed."""
        hits = list(takewhile(self._blocks.__contains__, chain[: (num_tokens - 1) // BLOCK_SIZE]))
        self._touch(hits)
        return len(hits) * BLOCK_SIZE

    def insert(self, chain: list[int]) -> None:
        self._touch(chain)
        evicted = []
        while len(self._blocks) > self._capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        self.told.add(chain)
        self.told.remove(evicted)

    def _touch(self, chain: list[int]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)


def refuse_unknown(sampling: SamplingParams) -> None:
    """Raises DecodeError for what this model cannot be held to."""
    for param in ("structured_outputs", "bad_words", "allowed_token_ids"):
        if getattr(sampling, param):
            raise DecodeError(
                ErrorReason.INVALID_ARGUMENT,
                f"the simulated engine does not know {param}",
                param=param,
            )
