"""How an answer that its decode worker cut off goes on elsewhere. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.replay import Replay
from pdserve.types import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Resumed:
    """What another worker is asked for; the last `answered` tokens of the request's prompt are
    the beginning of the answer."""

    request: EngineRequest
    answered: int = 0


def resumed(
    request: EngineRequest, token_ids: tuple[int, ...], num_chars: int, *, is_whole: bool
) -> Resumed:
    """`request` is the first one; of its answer, `token_ids` and `num_chars` characters were
    sent. `is_whole` says that their text does not end within a character.

    Where nothing but the tokens decides what follows, they are read as part of the prompt,
    all at once. Else they are replayed, one a step.
    """
    if not token_ids:
        return Resumed(request)
    # These came with the first token.
    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
    if not is_whole or holds_state(request.sampling):
        return Resumed(replace(request, replay=Replay(token_ids, num_chars)))
    answered = len(token_ids)
    sampling = request.sampling
    assert sampling.max_tokens is not None
    assert answered < sampling.max_tokens, "an answer of that many tokens has ended"
    return Resumed(
        replace(
            request,
            token_ids=request.token_ids + token_ids,
            sampling=replace(
                sampling,
                max_tokens=sampling.max_tokens - answered,
                min_tokens=max(0, sampling.min_tokens - answered),
            ),
        ),
        answered,
    )


def holds_state(sampling: SamplingParams) -> bool:
    """Whether an engine remembers more of an answer than its tokens: how far its random
    numbers are, what it counts, matches, or tells of them.

    Every parameter is taken to do so that is not named here.
    """
    default = SamplingParams()
    stateless = replace(
        sampling,
        max_tokens=default.max_tokens,
        temperature=default.temperature,
        top_p=default.top_p,
        top_k=default.top_k,
        min_p=default.min_p,
        seed=None if sampling.temperature == 0 else sampling.seed,
        stop_token_ids=default.stop_token_ids,
        min_tokens=default.min_tokens,
        ignore_eos=default.ignore_eos,
        logit_bias=default.logit_bias,
        allowed_token_ids=default.allowed_token_ids,
    )
    return stateless != default
