"""How tokens are sampled, and how likely they were; a part of `pdserve.types`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.structured import Constraint


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled, every default resolved.

    Ranges are those of `SamplingParams` in generation.proto; `max_tokens` of None
    means what is left of the context. `logit_bias` are pairs of token id and bias.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_outputs: Constraint | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    constrain_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was at its place; see `TokenLogprob` in generation.proto."""

    token_id: int
    logprob: float
    token: str
    rank: int


PositionLogprobs = tuple[TokenLogprob, ...]
"""The token that stands at a place, then the likeliest others in order."""
