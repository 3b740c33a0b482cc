"""gRPC requests made from the descriptors of the public service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from pdserve.channel import SIZE_OPTIONS
from pdserve.errors import ErrorReason
from pdserve.rpc_errors import error_info
from pdserve.v1 import inference_pb2
from pdserve.v1.generation_pb2 import Mode, SamplingParams
from tests.fuzz.system import OVERLOAD, TIMEOUT_S, System
from tests.fuzz.values import SOUND
from tests.support.sim_fleet import MODEL

_DEPTH = 6
"""Messages in messages; deeper ones are left out."""

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_SOUND = {
    name: values
    for name, values in SOUND.items()
    if name in SamplingParams.DESCRIPTOR.fields_by_name
} | {"logprobs": st.integers(0, 20), "prompt_logprobs": st.integers(0, 20)}


def fuzz(system: System) -> Iterator[tuple[str, Any]]:
    """By method, a test that sends one request each time that hypothesis calls it."""
    channel = grpc.insecure_channel(system.grpc, options=SIZE_OPTIONS)
    for method in _SERVICE.methods:
        path = f"/{_SERVICE.full_name}/{method.name}"
        # Sent as bytes, for some are no message.
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(path, response_deserializer=GetMessageClass(method.output_type).FromString)
        yield method.name, _asking(system, method, call)


def _asking(system: System, method: Any, call: Any) -> Any:
    asked = messages(GetMessageClass(method.input_type)).flatmap(_sound).map(_bytes)

    @given(sent=st.one_of(asked, asked, st.binary()))
    def ask(sent: bytes) -> None:
        status = "OK"
        with system.tally.timed():
            try:
                answer = call(sent, timeout=TIMEOUT_S)
                if method.server_streaming:
                    list(answer)
            except grpc.RpcError as error:
                status = _checked(error)
        system.tally.answers[method.name, status] += 1

    return ask


def messages(kind: Any, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Messages with any fields, of which any may be missing."""
    fields = {
        field.name: _values(field, depth)
        for field in kind.DESCRIPTOR.fields
        if depth > 0 or field.message_type is None
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))


def _values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (message.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_one(key, depth), _one(value, depth), max_size=8)
    one = _one(field, depth)
    return st.lists(one, max_size=8) if field.is_repeated else one


def _one(field: Any, depth: int) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case Field.CPPTYPE_MESSAGE:
            return messages(GetMessageClass(field.message_type), depth - 1)
        case Field.CPPTYPE_STRING:
            return st.binary() if field.type == Field.TYPE_BYTES else st.text()
        case Field.CPPTYPE_BOOL:
            return st.booleans()
        case Field.CPPTYPE_DOUBLE:
            return st.floats()
        case Field.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case Field.CPPTYPE_UINT32:
            return st.integers(0, 300) | st.integers(0, 2**32 - 1)
        case Field.CPPTYPE_UINT64:
            return st.integers(0, 2**64 - 1)
        case Field.CPPTYPE_INT64:
            return st.integers(-(2**63), 2**63 - 1)
        case _:  # int32 and enums, of which any number may come
            return st.integers(-1, 9) | st.integers(-(2**31), 2**31 - 1)


def _sound(message: Any) -> st.SearchStrategy[Any]:
    """The same with a model that is served, or what is sound instead."""
    request = getattr(message, "request", message)
    if not hasattr(request, "sampling"):
        return st.just(message)
    request.model = MODEL
    sampling = type(request.sampling)

    def mend(drawn: dict[str, Any] | None) -> Any:
        if drawn is not None:
            mode = abs(request.options.mode) % len(Mode.values())
            request.Clear()
            request.model = MODEL
            request.options.mode = mode
            request.sampling.MergeFrom(sampling(**drawn))
            if isinstance(request, inference_pb2.ChatRequest):
                request.messages.add(role="user", content="Hi")
            else:
                request.text = "Hi"
        return message

    return (st.none() | st.fixed_dictionaries({}, optional=_SOUND)).map(mend)


def _bytes(message: Any) -> bytes:
    sent: bytes = message.SerializeToString()
    return sent


def _checked(error: Any) -> str:
    """The reason, of an error that is as documented."""
    info = error_info(error)
    assert info is not None, error
    reason = ErrorReason[info.reason]
    assert error.code().name == reason.value.grpc
    assert reason.value.http < 500 or reason in OVERLOAD, error
    return f"{error.code().name} {reason.label}"
