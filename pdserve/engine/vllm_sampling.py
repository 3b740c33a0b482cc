"""How tokens are sampled and how likely they were, in vLLM's terms."""

from __future__ import annotations

import json
from typing import Any

from pdserve.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from pdserve.structured import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)

KV_PARAMS = "kv_transfer_params"
REPLAY = "pdserve_replay"
"""Among vLLM's `extra_args`: what a connector is told; the tokens that an answer begins with."""


def to_vllm(params: SamplingParams, extra_args: dict[str, Any]) -> Any:
    """vLLM's SamplingParams, every field of ours mapped; `extra_args` as vLLM has them."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    constraint = params.structured_outputs
    return VllmSamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,  # 0 is "all" to both
        min_p=params.min_p,
        seed=params.seed,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        logit_bias=dict(params.logit_bias) or None,
        structured_outputs=None if constraint is None else structured_to_vllm(constraint),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        bad_words=list(params.bad_words),
        allowed_token_ids=list(params.allowed_token_ids) or None,
        prompt_logprobs=params.prompt_logprobs,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args or None,
    )


def structured_to_vllm(constraint: Constraint) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match constraint:
        case JsonSchema(schema):
            return StructuredOutputsParams(json=schema)
        case JsonObject():
            return StructuredOutputsParams(json_object=True)
        case Regex(pattern):
            return StructuredOutputsParams(regex=pattern)
        case Choice(texts):
            return StructuredOutputsParams(choice=list(texts))
        case Grammar(text):
            return StructuredOutputsParams(grammar=text)
        case StructuralTag(tag):
            return StructuredOutputsParams(structural_tag=tag)


def structured_from_vllm(params: Any) -> Constraint:
    """What `structured_to_vllm` was given, or a parser of vLLM's has set."""
    if params.json_object:
        return JsonObject()
    if params.json is not None:
        schema = params.json
        return JsonSchema(schema if isinstance(schema, str) else json.dumps(schema))
    if params.regex is not None:
        return Regex(params.regex)
    if params.choice is not None:
        return Choice(tuple(params.choice))
    if params.grammar is not None:
        return Grammar(params.grammar)
    return StructuralTag(params.structural_tag)


def logprobs_of(positions: Any) -> list[PositionLogprobs] | None:
    """vLLM has the token of a place first, too; and nothing for the first one of a prompt."""
    if positions is None:
        return None
    return [
        tuple(
            TokenLogprob(token_id, one.logprob, one.decoded_token or "", one.rank)
            for token_id, one in position.items()
        )
        for position in positions
        if position is not None
    ]
