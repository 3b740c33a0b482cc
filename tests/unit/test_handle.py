"""What ties a KV handle to its prompt and to the fleet that made it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blake3 import blake3
from google.protobuf.message import DecodeError as ParseError
from hypothesis import assume, given
from hypothesis import strategies as st

from decode_svc.verify import HandleVerifier
from pdserve import convert
from pdserve.engine.base import EngineInfo
from pdserve.errors import ErrorReason, PdserveError
from pdserve.handle import digest, is_intact, seal_key, sealed
from pdserve.types import (
    EngineRequest,
    Fingerprint,
    GrpcDescriptor,
    KvDescriptor,
    KvHandle,
    NixlDescriptor,
    SamplingParams,
    SimDescriptor,
)
from pdserve.v1 import kv_pb2

NOW = 1_800_000_000
KEY = seal_key("the key of the fleet")
FINGERPRINT = Fingerprint("revision", "bfloat16", 32, "NHD")
ENGINE = EngineInfo("sim", FINGERPRINT, 8_192, 10_000, ("nixl", "grpc"), "bfloat16", 256, 64)
REQUEST = EngineRequest("r", (1, 2, 3), SamplingParams(max_tokens=1), cache_salt="salt")
DESCRIPTORS = [
    NixlDescriptor("engine", "request", ((1, 2), (300,)), "10.0.0.7", 7001, 2),
    GrpcDescriptor("transfer", "epoch", "10.0.0.7", (7002, 7003)),
    SimDescriptor(1_843_200, "nixl", "transfer", "epoch", "127.0.0.1", 7001),
]
by_descriptor = pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=lambda d: type(d).__name__)


def made(descriptor: KvDescriptor) -> KvHandle:
    handle = KvHandle(
        handle_id="b6a5a2cd9a3c4b1fae3d2f6f7b9a1c55",
        worker_id="prefill-0",
        epoch="0f1e2d3c4b5a6978",
        fingerprint=FINGERPRINT,
        digest=digest(REQUEST.token_ids, REQUEST.cache_salt, REQUEST.lora),
        num_tokens=3,
        lease_expiry_ns=(NOW + 30) * 10**9 + 123_456_789,
        descriptor=descriptor,
    )
    return sealed(handle, KEY)


def test_the_digest_is_over_little_endian_ids_then_the_salt_and_the_adapter() -> None:
    assert digest((1, 256), "s", "") == blake3(b"\1\0\0\0\0\1\0\0\1\0\0\0s").digest()
    assert digest((1,), "s", "t") == blake3(b"\1\0\0\0\1\0\0\0st").digest()
    assert digest((1,), "st", "") == blake3(b"\1\0\0\0\2\0\0\0st").digest()


def test_a_seal_key_is_derived_from_the_fleet_s_and_is_the_same_for_all_without_one() -> None:
    context = "pdserve 2026-11-29 seal of KV handles"
    assert seal_key("k") == blake3(b"k", derive_key_context=context).digest()
    assert seal_key(None) == blake3(b"", derive_key_context=context).digest()


@by_descriptor
def test_a_seal_outlives_the_wire_and_is_good_with_its_key_alone(descriptor: KvDescriptor) -> None:
    read = convert.handle_from_proto(
        kv_pb2.KvHandle.FromString(convert.handle_to_proto(made(descriptor)).SerializeToString())
    )
    assert is_intact(read, KEY)
    assert not is_intact(read, seal_key(None))
    assert not is_intact(replace(read, seal=b""), KEY)


@by_descriptor
@given(data=st.data())
def test_no_handle_of_which_a_bit_was_flipped_on_the_wire_is_used(
    descriptor: KvDescriptor, data: st.DataObject
) -> None:
    message = convert.handle_to_proto(made(descriptor))
    wire = bytearray(message.SerializeToString())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        altered = kv_pb2.KvHandle.FromString(bytes(wire))
    except ParseError:
        return  # gRPC refuses a message that holds it
    altered.DiscardUnknownFields()
    assume(altered != message)
    with pytest.raises(PdserveError) as caught:
        handle = convert.handle_from_proto(altered)
        HandleVerifier(ENGINE, KEY).use(handle, REQUEST, NOW)
    unknown = altered.WhichOneof("transport") is None
    expected = ErrorReason.KV_INCOMPATIBLE if unknown else ErrorReason.KV_ALTERED
    assert caught.value.reason is expected
