"""Every pair of copiers changes nothing on a round trip through the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import convert, convert_sampling, convert_worker
from pdserve.errors import DecodeError, ErrorReason, PdserveError
from pdserve.sampling import TokenLogprob
from pdserve.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, StructuralTag
from pdserve.types import (
    Delta,
    EngineRequest,
    EngineWork,
    Failure,
    Fingerprint,
    FinishReason,
    FirstTokenTimings,
    GrpcDescriptor,
    KvHandle,
    Load,
    Mode,
    NixlDescriptor,
    PositionLogprobs,
    PrefillResult,
    Role,
    SamplingParams,
    SimDescriptor,
    Usage,
    WorkerInfo,
)
from pdserve.v1 import decode_pb2, generation_pb2, kv_pb2, worker_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(uint32, max_size=20).map(tuple)
seconds = st.integers(0, 10**15).map(lambda nanos: nanos / 1e9)
"""Times that a Duration holds; rounded to nanoseconds by the wire."""

constraint = (
    st.builds(JsonSchema, text)
    | st.just(JsonObject())
    | st.builds(Regex, text)
    | st.builds(Choice, st.lists(text, max_size=3).map(tuple))
    | st.builds(Grammar, text)
    | st.builds(StructuralTag, text)
)
floats = st.floats(width=32, allow_nan=False)
positions = st.lists(
    st.lists(st.builds(TokenLogprob, uint32, floats, text, uint32), max_size=3).map(tuple),
    min_size=1,
    max_size=3,
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.none() | uint32,
    temperature=finite,
    top_p=finite,
    top_k=uint32,
    min_p=finite,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(text, max_size=4).map(tuple),
    stop_token_ids=ids,
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=finite,
    min_tokens=uint32,
    ignore_eos=st.booleans(),
    logprobs=st.none() | uint32,
    logit_bias=st.dictionaries(uint32, finite, max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    structured_outputs=st.none() | constraint,
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    bad_words=st.lists(text, max_size=2).map(tuple),
    allowed_token_ids=ids,
    prompt_logprobs=st.none() | uint32,
)
share = st.floats(0, 1)
quarters = st.integers(0, 2**32).map(lambda number: number / 4)
"""Seconds that a Duration and a float hold alike."""
usage = st.builds(Usage, uint32, uint32, uint32)
fingerprint = st.builds(Fingerprint, text, text, uint32, text, uint32, uint32)
descriptor = (
    st.builds(
        NixlDescriptor, text, text, st.lists(ids, max_size=3).map(tuple), text, uint32, uint32
    )
    | st.builds(SimDescriptor, uint64, text, text, text, text, uint32)
    | st.builds(GrpcDescriptor, text, text, text, ids)
)
handle = st.builds(
    KvHandle,
    handle_id=text,
    worker_id=text,
    epoch=text,
    fingerprint=fingerprint,
    digest=st.binary(max_size=40),
    num_tokens=uint32,
    lease_expiry_ns=st.integers(0, 2**63 - 1),
    descriptor=descriptor,
    seal=st.binary(max_size=40),
)
request = st.builds(EngineRequest, text, ids, sampling, text, lora=text)
info = st.builds(
    WorkerInfo,
    worker_id=text,
    epoch=text,
    roles=st.frozensets(st.sampled_from(Role)),
    model=text,
    fingerprint=fingerprint,
    engine=text,
    context_length=uint32,
    kv_capacity_tokens=uint64,
    transports=st.lists(text, max_size=3).map(tuple),
    weights=text,
    version=text,
    chunk_tokens=st.integers(1, 2**32 - 1),
    max_sequences=uint32,
    tells_cache=st.booleans(),
)
load = st.builds(Load, uint32, uint32, share, uint32, uint64, st.booleans(), uint64, quarters)
failure = st.builds(Failure, st.sampled_from(ErrorReason), text, text)


work = st.builds(EngineWork, uint64, finite, uint64, uint64, uint64, finite)


def wired(message: Any) -> Any:
    """The message as a peer would parse it."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("values", "to_proto", "from_proto"),
    [
        (sampling, convert_sampling.sampling_to_proto, convert_sampling.sampling_from_proto),
        (usage, convert.usage_to_proto, convert.usage_from_proto),
        (fingerprint, convert.fingerprint_to_proto, convert.fingerprint_from_proto),
        (handle, convert.handle_to_proto, convert.handle_from_proto),
        (info, convert_worker.worker_info_to_proto, convert_worker.worker_info_from_proto),
        (load, convert_worker.load_to_proto, convert_worker.load_from_proto),
        (work, convert_worker.work_to_proto, convert_worker.work_from_proto),
        (failure, convert.failure_to_proto, convert.failure_from_proto),
    ],
)
@given(data=st.data())
def test_a_round_trip_changes_nothing(
    values: st.SearchStrategy[Any],
    to_proto: Callable[[Any], Any],
    from_proto: Callable[[Any], Any],
    data: st.DataObject,
) -> None:
    value = data.draw(values)
    assert from_proto(wired(to_proto(value))) == value


@given(uint64, request, st.none() | handle)
def test_a_start_keeps_request_and_handle(
    sequence_id: int, asked: EngineRequest, kv: KvHandle | None
) -> None:
    message = wired(convert.start_to_proto(sequence_id, asked, kv))
    assert message.sequence_id == sequence_id
    assert convert.start_from_proto(message) == (asked, kv)


@given(request)
def test_a_prefill_keeps_the_prompt_and_nothing_of_the_sampling(asked: EngineRequest) -> None:
    read = convert.prefill_request_from_proto(
        wired(convert.prefill_request_to_proto(asked, "grpc"))
    )
    assert (read.request_id, read.token_ids, read.cache_salt, read.lora) == (
        asked.request_id,
        asked.token_ids,
        asked.cache_salt,
        asked.lora,
    )
    assert read.sampling == SamplingParams(max_tokens=1, temperature=0.0)


@given(handle, uint32, seconds, seconds)
def test_a_prefill_result_keeps_its_times_to_the_nanosecond(
    claim: KvHandle, cached: int, queue_s: float, prefill_s: float
) -> None:
    result = PrefillResult(claim, cached, queue_s, prefill_s)
    read = convert.prefill_result_from_proto(wired(convert.prefill_result_to_proto(result)))
    assert (read.handle, read.cached_tokens) == (claim, cached)
    assert (read.queue_s, read.prefill_s) == pytest.approx((queue_s, prefill_s), abs=1e-9)


@given(
    uint64,
    text,
    st.lists(uint32, max_size=4),
    st.none() | st.tuples(st.sampled_from(FinishReason), usage, st.none() | text | uint32),
    st.none() | st.tuples(seconds, seconds, st.just(0.0) | seconds),
    st.none() | positions,
)
def test_a_delta_keeps_what_it_has(
    sequence_id: int,
    piece: str,
    token_ids: list[int],
    end: tuple[FinishReason, Usage, str | int | None] | None,
    timings: tuple[float, float, float] | None,
    logprobs: list[PositionLogprobs] | None,
) -> None:
    delta = Delta(piece, token_ids, logprobs=logprobs, prompt_logprobs=logprobs)
    if end is not None:
        delta.finish_reason, delta.usage, delta.stop_reason = end
    if timings is not None:
        delta.timings = FirstTokenTimings(*timings)
    message = wired(convert.delta_to_proto(sequence_id, delta))
    read = convert.delta_from_proto(message)

    assert message.sequence_id == sequence_id
    assert (read.text, read.token_ids, read.logprobs) == (piece, token_ids, logprobs)
    assert (read.finish_reason, read.usage) == (delta.finish_reason, delta.usage)
    assert (read.stop_reason, read.prompt_logprobs) == (delta.stop_reason, logprobs)
    assert (read.timings is None) == (timings is None)
    if read.timings is not None:
        assert astuple(read.timings) == pytest.approx(timings, abs=1e-9)


@pytest.mark.parametrize("mode", Mode)
def test_modes_round_trip(mode: Mode) -> None:
    assert convert.mode_from_proto(convert.mode_to_proto(mode)) is mode


def test_an_unset_mode_is_none_and_an_unknown_one_is_refused() -> None:
    assert convert.mode_from_proto(0) is None
    with pytest.raises(PdserveError) as caught:
        convert.mode_from_proto(99)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.param == "options.mode"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_nothing_can_be_reckoned_with_are_refused(value: float) -> None:
    said = [
        Load(kv_usage=value),
        Load(work=EngineWork(steps=1, seconds=value)),
        Load(work=EngineWork(steps=1, kv_usage=value)),
    ]
    for load_ in said:
        with pytest.raises(DecodeError, match=r"(kv_usage|seconds) is -?(nan|inf)"):
            convert_worker.load_from_proto(wired(convert_worker.load_to_proto(load_)))


@pytest.mark.parametrize("value", [-0.01, 1.01, 1e308])
def test_more_or_less_than_a_whole_cache_cannot_be_in_use(value: float) -> None:
    with pytest.raises(DecodeError, match="kv_usage is"):
        convert_worker.load_from_proto(wired(convert_worker.load_to_proto(Load(kv_usage=value))))


def test_a_worker_that_does_not_say_how_much_a_step_reads_is_refused() -> None:
    with pytest.raises(DecodeError, match="chunk_tokens is 0"):
        convert_worker.worker_info_from_proto(worker_pb2.GetWorkerInfoResponse(worker_id="old"))


def test_an_unknown_reason_is_internal() -> None:
    assert convert.reason_from_proto(9_999) is ErrorReason.INTERNAL


def test_a_handle_without_a_transport_is_incompatible() -> None:
    with pytest.raises(PdserveError) as caught:
        convert.handle_from_proto(kv_pb2.KvHandle(handle_id="a"))
    assert caught.value.reason is ErrorReason.KV_INCOMPATIBLE


def test_a_finish_reason_of_a_newer_version_is_told_apart_from_none() -> None:
    message = decode_pb2.SequenceDelta(sequence_id=1, text="a", token_ids=[1])
    message.finish_reason = 77  # type: ignore[assignment]
    with pytest.raises(DecodeError, match="unknown here"):
        convert.delta_from_proto(message)


def test_structured_outputs_that_name_no_constraint_are_refused() -> None:
    for asked in (
        generation_pb2.StructuredOutputs(),
        generation_pb2.StructuredOutputs(json_object=False),
    ):
        with pytest.raises(PdserveError) as caught:
            convert_sampling.sampling_from_proto(
                generation_pb2.SamplingParams(structured_outputs=asked)
            )
        assert caught.value.param == "sampling.structured_outputs"
