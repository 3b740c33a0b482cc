"""What a decode worker demands of a KV handle."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from decode_svc.verify import HandleVerifier
from pdserve.engine.base import EngineInfo
from pdserve.errors import DecodeError, ErrorReason
from pdserve.handle import digest, seal_key, sealed
from pdserve.types import (
    EngineRequest,
    Fingerprint,
    GrpcDescriptor,
    KvHandle,
    SamplingParams,
    SimDescriptor,
)

NOW = 1_000.0
KV = SimDescriptor(7, "nixl", "t", "e", "h", 1)
FINGERPRINT = Fingerprint("revision", "bfloat16", 32, "NHD")
ENGINE = EngineInfo("sim", FINGERPRINT, 8_192, 10_000, ("nixl",), "bfloat16", 256, 64)
REQUEST = EngineRequest("r", (1, 2, 3), SamplingParams(max_tokens=1), cache_salt="salt")
KEY = seal_key("the key of the fleet")
UNSEALED = KvHandle(
    handle_id="handle",
    worker_id="prefill-0",
    epoch="epoch",
    fingerprint=FINGERPRINT,
    digest=digest(REQUEST.token_ids, "salt", ""),
    num_tokens=3,
    lease_expiry_ns=round((NOW + 30) * 1e9),
    descriptor=KV,
)
HANDLE = sealed(UNSEALED, KEY)


def made(**change: Any) -> KvHandle:
    """A handle that its maker sealed so."""
    return sealed(replace(UNSEALED, **change), KEY)


def refusal(
    handle: KvHandle, request: EngineRequest = REQUEST, verifier: HandleVerifier | None = None
) -> tuple[ErrorReason, str]:
    with pytest.raises(DecodeError) as caught:
        (verifier or HandleVerifier(ENGINE, KEY)).use(handle, request, NOW)
    return caught.value.reason, caught.value.message


@pytest.mark.parametrize(
    "handle",
    [
        UNSEALED,
        replace(HANDLE, seal=HANDLE.seal[:-1]),
        replace(HANDLE, worker_id="prefill-1"),
        replace(HANDLE, descriptor=replace(KV, port=2)),
        sealed(UNSEALED, seal_key("the key of another fleet")),
        # Nothing else is looked at before the seal.
        replace(HANDLE, lease_expiry_ns=0, digest=b"", num_tokens=9),
    ],
)
def test_what_is_not_as_it_was_sealed_is_refused(handle: KvHandle) -> None:
    reason, message = refusal(handle)
    assert reason is ErrorReason.KV_ALTERED
    assert message == "the KV handle is not as it was sealed, or its fleet has another key"


def test_a_sound_handle_gives_its_descriptor() -> None:
    assert HandleVerifier(ENGINE, KEY).use(HANDLE, REQUEST, NOW) == KV


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_any_difference_of_the_pools_is_refused_and_named(name: str) -> None:
    ours = getattr(FINGERPRINT, name)
    theirs = ours + 1 if isinstance(ours, int) else ours + "x"
    foreign = made(fingerprint=replace(FINGERPRINT, **{name: theirs}))  # type: ignore[arg-type]
    reason, message = refusal(foreign)
    assert reason is ErrorReason.KV_INCOMPATIBLE
    assert message == f"the KV was made with {name} {theirs!r}, not {ours!r}"


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (
            {"descriptor": GrpcDescriptor("t", "e", "h", (1,))},
            ErrorReason.KV_INCOMPATIBLE,
            "transport grpc cannot",
        ),
        ({"num_tokens": 4}, ErrorReason.KV_DIGEST_MISMATCH, "covers 4 tokens, the prompt has 3"),
        ({"digest": b""}, ErrorReason.KV_DIGEST_MISMATCH, "digest"),
        ({"lease_expiry_ns": round(NOW * 1e9)}, ErrorReason.KV_EXPIRED, "ended 0.000 s ago"),
        ({"lease_expiry_ns": round((NOW - 2) * 1e9)}, ErrorReason.KV_EXPIRED, "ended 2.000 s ago"),
        ({"lease_expiry_ns": 0}, ErrorReason.KV_EXPIRED, "ended"),
    ],
)
def test_an_unsound_handle_is_refused(
    change: dict[str, object], reason: ErrorReason, words: str
) -> None:
    told, message = refusal(made(**change))  # type: ignore[arg-type]
    assert told is reason
    assert words in message


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, token_ids=(1, 2, 4)),
        replace(REQUEST, cache_salt="other"),
        replace(REQUEST, lora="french"),
    ],
)
def test_kv_of_another_prompt_salt_or_adapter_is_refused(request_: EngineRequest) -> None:
    assert refusal(HANDLE, request_)[0] is ErrorReason.KV_DIGEST_MISMATCH


def test_a_handle_is_good_once() -> None:
    verifier = HandleVerifier(ENGINE, KEY)
    verifier.use(HANDLE, REQUEST, NOW)
    assert refusal(HANDLE, verifier=verifier)[0] is ErrorReason.KV_REUSED


def test_a_refused_handle_is_not_used_up() -> None:
    verifier = HandleVerifier(ENGINE, KEY)
    refusal(HANDLE, replace(REQUEST, token_ids=(9, 9, 9)), verifier)
    verifier.use(HANDLE, REQUEST, NOW)
    assert verifier.remembered == 1


def test_used_handles_are_forgotten_when_they_expire() -> None:
    verifier = HandleVerifier(ENGINE, KEY)
    verifier.use(HANDLE, REQUEST, NOW)
    with pytest.raises(DecodeError) as caught:
        verifier.use(HANDLE, REQUEST, NOW + 31)
    assert caught.value.reason is ErrorReason.KV_EXPIRED
    later = made(handle_id="later", lease_expiry_ns=round((NOW + 60) * 1e9))
    verifier.use(later, REQUEST, NOW + 31)
    assert verifier.remembered == 1


def test_memory_of_used_handles_is_bounded() -> None:
    verifier = HandleVerifier(ENGINE, KEY, max_remembered=2)
    for number in range(5):
        verifier.use(made(handle_id=str(number)), REQUEST, NOW)
    assert verifier.remembered == 2
    assert refusal(made(handle_id="4"), verifier=verifier)[0] is ErrorReason.KV_REUSED
