"""The only copier between protobuf messages and the dataclasses of `pdserve.types`.

`x_to_proto` and `x_from_proto` come in pairs; a round trip changes nothing. What workers say
of themselves is copied in `pdserve.convert_worker`, how tokens are sampled in
`pdserve.convert_sampling`. What a peer
sends is trusted to be well-formed protobuf and no more: a value that no dataclass can hold
raises PdserveError INVALID_ARGUMENT.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from pdserve.convert_sampling import (
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from pdserve.errors import REASON_BY_NUMBER, DecodeError, ErrorReason, PdserveError
from pdserve.replay import Replay
from pdserve.types import (
    Delta,
    EngineRequest,
    Failure,
    Fingerprint,
    FinishReason,
    FirstTokenTimings,
    GrpcDescriptor,
    KvDescriptor,
    KvHandle,
    Mode,
    NixlDescriptor,
    PrefillResult,
    Route,
    SamplingParams,
    SimDescriptor,
    Usage,
)
from pdserve.v1 import decode_pb2, generation_pb2, kv_pb2, prefill_pb2
from pdserve.v1.errors_pb2 import ErrorReason as ErrorReasonProto
from pdserve.v1.generation_pb2 import FinishReason as FinishReasonProto
from pdserve.v1.generation_pb2 import Mode as ModeProto

_MODE_TO_PROTO = {
    Mode.COLOCATED: generation_pb2.MODE_COLOCATED,
    Mode.DISAGGREGATED: generation_pb2.MODE_DISAGGREGATED,
    Mode.AUTO: generation_pb2.MODE_AUTO,
}
_MODE_FROM_PROTO: dict[int, Mode] = {number: mode for mode, number in _MODE_TO_PROTO.items()}
_FINISH_TO_PROTO = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PROTO: dict[int, FinishReason | None] = {
    number: reason for reason, number in _FINISH_TO_PROTO.items()
}


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9


def mode_to_proto(mode: Mode) -> ModeProto.ValueType:
    return _MODE_TO_PROTO[mode]


def mode_from_proto(number: int) -> Mode | None:
    """None for MODE_UNSPECIFIED. Raises PdserveError for a number that is no mode."""
    if number == generation_pb2.MODE_UNSPECIFIED:
        return None
    try:
        return _MODE_FROM_PROTO[number]
    except KeyError:
        raise PdserveError(
            ErrorReason.INVALID_ARGUMENT, f"mode {number} is not known", param="options.mode"
        ) from None


def finish_to_proto(reason: FinishReason | None) -> FinishReasonProto.ValueType:
    return _FINISH_TO_PROTO[reason]


def reason_to_proto(reason: ErrorReason) -> ErrorReasonProto.ValueType:
    return ErrorReasonProto.ValueType(reason.value.number)


def reason_from_proto(number: int) -> ErrorReason:
    """INTERNAL for a reason that this version does not know."""
    return REASON_BY_NUMBER.get(number, ErrorReason.INTERNAL)


def usage_to_proto(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
    )


def route_to_proto(route: Route) -> generation_pb2.Route:
    return generation_pb2.Route(mode=_MODE_TO_PROTO[route.mode], reason=route.reason, arm=route.arm)


def fingerprint_to_proto(value: Fingerprint) -> kv_pb2.Fingerprint:
    return kv_pb2.Fingerprint(
        model_revision=value.model_revision,
        kv_dtype=value.kv_dtype,
        block_size=value.block_size,
        layout=value.layout,
        tensor_parallel=value.tensor_parallel,
        pipeline_parallel=value.pipeline_parallel,
        adapters=value.adapters,
    )


def fingerprint_from_proto(message: kv_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        message.model_revision,
        message.kv_dtype,
        message.block_size,
        message.layout,
        message.tensor_parallel,
        message.pipeline_parallel,
        message.adapters,
    )


def handle_to_proto(handle: KvHandle) -> kv_pb2.KvHandle:
    seconds_, nanos = divmod(handle.lease_expiry_ns, 10**9)
    message = kv_pb2.KvHandle(
        handle_id=handle.handle_id,
        worker_id=handle.worker_id,
        epoch=handle.epoch,
        fingerprint=fingerprint_to_proto(handle.fingerprint),
        digest=handle.digest,
        num_tokens=handle.num_tokens,
        lease_expiry=Timestamp(seconds=seconds_, nanos=nanos),
        seal=handle.seal,
    )
    match handle.descriptor:
        case NixlDescriptor() as nixl:
            message.nixl.CopyFrom(_nixl_to_proto(nixl))
        case GrpcDescriptor(transfer_id, epoch, host, ports):
            message.grpc.CopyFrom(
                kv_pb2.GrpcDescriptor(transfer_id=transfer_id, epoch=epoch, host=host, ports=ports)
            )
        case SimDescriptor(num_bytes, transport, transfer_id, epoch, host, port):
            message.sim.CopyFrom(
                kv_pb2.SimDescriptor(
                    num_bytes=num_bytes,
                    transport=transport,
                    transfer_id=transfer_id,
                    epoch=epoch,
                    host=host,
                    port=port,
                )
            )
    return message


def handle_from_proto(message: kv_pb2.KvHandle) -> KvHandle:
    """Raises PdserveError KV_INCOMPATIBLE for a transport that this version does not know, and
    KV_ALTERED for an expiry that no handle can have."""
    return KvHandle(
        handle_id=message.handle_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        fingerprint=fingerprint_from_proto(message.fingerprint),
        digest=message.digest,
        num_tokens=message.num_tokens,
        lease_expiry_ns=_nanoseconds(message.lease_expiry),
        descriptor=_descriptor_from_proto(message),
        seal=message.seal,
    )


def _nanoseconds(message: Timestamp) -> int:
    nanoseconds = message.seconds * 10**9 + message.nanos
    if not 0 <= nanoseconds < 2**63:
        raise PdserveError(ErrorReason.KV_ALTERED, "the KV handle ends at no time that there is")
    return nanoseconds


def _descriptor_from_proto(message: kv_pb2.KvHandle) -> KvDescriptor:
    match message.WhichOneof("transport"):
        case "nixl":
            return _nixl_from_proto(message.nixl)
        case "grpc":
            grpc = message.grpc
            return GrpcDescriptor(grpc.transfer_id, grpc.epoch, grpc.host, tuple(grpc.ports))
        case "sim":
            sim = message.sim
            return SimDescriptor(
                sim.num_bytes, sim.transport, sim.transfer_id, sim.epoch, sim.host, sim.port
            )
        case _:
            raise PdserveError(
                ErrorReason.KV_INCOMPATIBLE, "the KV handle names no transport that is known here"
            )


def _nixl_to_proto(value: NixlDescriptor) -> kv_pb2.NixlDescriptor:
    return kv_pb2.NixlDescriptor(
        engine_id=value.engine_id,
        request_id=value.request_id,
        block_groups=[kv_pb2.BlockIds(ids=group) for group in value.block_groups],
        host=value.host,
        port=value.port,
        tensor_parallel=value.tensor_parallel,
    )


def _nixl_from_proto(message: kv_pb2.NixlDescriptor) -> NixlDescriptor:
    return NixlDescriptor(
        engine_id=message.engine_id,
        request_id=message.request_id,
        block_groups=tuple(tuple(group.ids) for group in message.block_groups),
        host=message.host,
        port=message.port,
        tensor_parallel=message.tensor_parallel,
    )


def prefill_request_to_proto(request: EngineRequest, transport: str) -> prefill_pb2.PrefillRequest:
    """The prefill leg: the prompt and its salt, and nothing of the sampling."""
    return prefill_pb2.PrefillRequest(
        request_id=request.request_id,
        prompt=generation_pb2.TokenIds(ids=request.token_ids),
        cache_salt=request.cache_salt,
        transport=transport,
        traceparent=request.traceparent,
        lora=request.lora,
    )


def prefill_request_from_proto(message: prefill_pb2.PrefillRequest) -> EngineRequest:
    return EngineRequest(
        request_id=message.request_id,
        token_ids=tuple(message.prompt.ids),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        lora=message.lora,
    )


def prefill_result_to_proto(result: PrefillResult) -> prefill_pb2.PrefillFinished:
    return prefill_pb2.PrefillFinished(
        handle=handle_to_proto(result.handle),
        cached_tokens=result.cached_tokens,
        queue_time=duration(result.queue_s),
        prefill_time=duration(result.prefill_s),
    )


def prefill_result_from_proto(message: prefill_pb2.PrefillFinished) -> PrefillResult:
    return PrefillResult(
        handle=handle_from_proto(message.handle),
        cached_tokens=message.cached_tokens,
        queue_s=seconds(message.queue_time),
        prefill_s=seconds(message.prefill_time),
    )


def start_to_proto(
    sequence_id: int, request: EngineRequest, kv: KvHandle | None
) -> decode_pb2.StartSequence:
    return decode_pb2.StartSequence(
        sequence_id=sequence_id,
        request_id=request.request_id,
        prompt=generation_pb2.TokenIds(ids=request.token_ids),
        sampling=sampling_to_proto(request.sampling),
        cache_salt=request.cache_salt,
        kv=None if kv is None else handle_to_proto(kv),
        replay=None if request.replay is None else _replay_to_proto(request.replay),
        traceparent=request.traceparent,
        lora=request.lora,
    )


def start_from_proto(message: decode_pb2.StartSequence) -> tuple[EngineRequest, KvHandle | None]:
    request = EngineRequest(
        request_id=message.request_id,
        token_ids=tuple(message.prompt.ids),
        sampling=sampling_from_proto(message.sampling),
        cache_salt=message.cache_salt,
        replay=_replay_from_proto(message.replay) if message.HasField("replay") else None,
        traceparent=message.traceparent,
        lora=message.lora,
    )
    return request, handle_from_proto(message.kv) if message.HasField("kv") else None


def _replay_to_proto(replay: Replay) -> decode_pb2.Replay:
    return decode_pb2.Replay(token_ids=replay.token_ids, num_chars=replay.num_chars)


def _replay_from_proto(message: decode_pb2.Replay) -> Replay:
    return Replay(tuple(message.token_ids), message.num_chars)


def delta_to_proto(sequence_id: int, delta: Delta) -> decode_pb2.SequenceDelta:
    message = decode_pb2.SequenceDelta(
        sequence_id=sequence_id, text=delta.text, token_ids=delta.token_ids
    )
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_TO_PROTO[delta.finish_reason]
    if delta.usage is not None:
        message.usage.CopyFrom(usage_to_proto(delta.usage))
    if delta.timings is not None:
        message.timings.queue_time.CopyFrom(duration(delta.timings.queue_s))
        message.timings.first_step_time.CopyFrom(duration(delta.timings.first_step_s))
        if delta.timings.transfer_s:
            message.timings.transfer_time.CopyFrom(duration(delta.timings.transfer_s))
    if delta.logprobs is not None:
        message.logprobs.extend(logprobs_to_proto(delta.logprobs))
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.extend(logprobs_to_proto(delta.prompt_logprobs))
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def delta_from_proto(message: decode_pb2.SequenceDelta) -> Delta:
    """On the token path: the rare fields are looked at only where they can be set.

    Raises DecodeError for a finish reason that this version does not know.
    """
    delta = Delta(message.text, message.token_ids[:])
    if message.finish_reason:
        delta.finish_reason = _FINISH_FROM_PROTO.get(message.finish_reason)
        if delta.finish_reason is None:
            raise DecodeError(ErrorReason.INTERNAL, "the answer ended in a way unknown here")
        delta.usage = usage_from_proto(message.usage)
        met = message.WhichOneof("met")
        delta.stop_reason = None if met is None else getattr(message, met)
    if message.HasField("timings"):
        timings = message.timings
        delta.timings = FirstTokenTimings(
            seconds(timings.queue_time),
            seconds(timings.first_step_time),
            seconds(timings.transfer_time),
        )
    if message.logprobs:
        delta.logprobs = logprobs_from_proto(message.logprobs)
    if message.prompt_logprobs:
        delta.prompt_logprobs = logprobs_from_proto(message.prompt_logprobs)
    return delta


def failure_to_proto(failure: Failure) -> decode_pb2.Failure:
    return decode_pb2.Failure(
        reason=reason_to_proto(failure.reason), message=failure.message, param=failure.param
    )


def failure_from_proto(message: decode_pb2.Failure) -> Failure:
    return Failure(reason_from_proto(message.reason), message.message, message.param)
