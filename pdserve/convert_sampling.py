"""Copies how tokens are sampled and how likely they were: as `pdserve.convert`, of which it is
a part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdserve.errors import ErrorReason, PdserveError
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
from pdserve.v1 import generation_pb2 as pb


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    constraint = params.structured_outputs
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        logit_bias=dict(params.logit_bias),
        structured_outputs=None if constraint is None else _constraint_to_proto(constraint),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids,
        prompt_logprobs=params.prompt_logprobs,
        constrain_reasoning=params.constrain_reasoning,
    )


def sampling_from_proto(
    message: pb.SamplingParams, defaults: SamplingParams = SamplingParams()
) -> SamplingParams:
    """Takes the defaults for numbers that are not set."""
    optional = {
        name: getattr(message, name)
        for name in _OPTIONAL
        if message.HasField(name)  # type: ignore[arg-type]  # the stub lists the names one by one
    }
    return replace(
        defaults,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        structured_outputs=_constraint_from_proto(message),
        include_stop_str_in_output=message.include_stop_str_in_output,
        bad_words=tuple(message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
        constrain_reasoning=message.constrain_reasoning,
        **optional,
    )


_OPTIONAL = tuple(
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)


def _constraint_to_proto(constraint: Constraint) -> pb.StructuredOutputs:
    match constraint:
        case JsonSchema(schema):
            return pb.StructuredOutputs(json_schema=schema)
        case JsonObject():
            return pb.StructuredOutputs(json_object=True)
        case Regex(pattern):
            return pb.StructuredOutputs(regex=pattern)
        case Choice(texts):
            return pb.StructuredOutputs(choice=pb.StructuredOutputs.Choice(texts=texts))
        case Grammar(text):
            return pb.StructuredOutputs(grammar=text)
        case StructuralTag(tag):
            return pb.StructuredOutputs(structural_tag=tag)


def _constraint_from_proto(message: pb.SamplingParams) -> Constraint | None:
    """Raises PdserveError INVALID_ARGUMENT where it is there and says nothing."""
    if not message.HasField("structured_outputs"):
        return None
    asked = message.structured_outputs
    match asked.WhichOneof("constraint"):
        case "json_schema":
            return JsonSchema(asked.json_schema)
        case "json_object" if asked.json_object:
            return JsonObject()
        case "regex":
            return Regex(asked.regex)
        case "choice":
            return Choice(tuple(asked.choice.texts))
        case "grammar":
            return Grammar(asked.grammar)
        case "structural_tag":
            return StructuralTag(asked.structural_tag)
        case _:
            raise PdserveError(
                ErrorReason.INVALID_ARGUMENT,
                "sampling.structured_outputs must name one constraint",
                param="sampling.structured_outputs",
            )


def logprobs_to_proto(positions: Iterable[PositionLogprobs]) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs(
            candidates=[
                pb.TokenLogprob(
                    token_id=one.token_id, logprob=one.logprob, token=one.token, rank=one.rank
                )
                for one in position
            ]
        )
        for position in positions
    ]


def logprobs_from_proto(messages: Iterable[pb.PositionLogprobs]) -> list[PositionLogprobs]:
    return [
        tuple(
            TokenLogprob(one.token_id, one.logprob, one.token, one.rank)
            for one in message.candidates
        )
        for message in messages
    ]
