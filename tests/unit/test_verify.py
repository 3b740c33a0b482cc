"""What a decode worker demands of a KV handle."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from decode_svc.verify import HandleVerifier
from pdserve.engine.base import EngineInfo
from pdserve.errors import DecodeError, ErrorReason
from pdserve.handle import digest
from pdserve.types import (
    EngineRequest,
    Fingerprint,
    GrpcDescriptor,
    KvHandle,
    SamplingParams,
    SimDescriptor,
)

NOW = 1_000.0
FINGERPRINT = Fingerprint("revision", "bfloat16", 32, "NHD")
ENGINE = EngineInfo("sim", FINGERPRINT, 8_192, 10_000, ("nixl",))
REQUEST = EngineRequest("r", (1, 2, 3), SamplingParams(max_tokens=1), cache_salt="salt")
HANDLE = KvHandle(
    handle_id="handle",
    worker_id="prefill-0",
    epoch="epoch",
    fingerprint=FINGERPRINT,
    digest=digest(REQUEST.token_ids, "salt"),
    num_tokens=3,
    lease_expiry=NOW + 30,
    descriptor=SimDescriptor(7, "nixl"),
)


def refusal(
    handle: KvHandle, request: EngineRequest = REQUEST, verifier: HandleVerifier | None = None
) -> tuple[ErrorReason, str]:
    with pytest.raises(DecodeError) as caught:
        (verifier or HandleVerifier(ENGINE)).use(handle, request, NOW)
    return caught.value.reason, caught.value.message


def test_a_sound_handle_gives_its_descriptor() -> None:
    assert HandleVerifier(ENGINE).use(HANDLE, REQUEST, NOW) == SimDescriptor(7, "nixl")


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_any_difference_of_the_pools_is_refused_and_named(name: str) -> None:
    ours = getattr(FINGERPRINT, name)
    theirs = ours + 1 if isinstance(ours, int) else ours + "x"
    foreign = replace(HANDLE, fingerprint=replace(FINGERPRINT, **{name: theirs}))  # type: ignore[arg-type]
    reason, message = refusal(foreign)
    assert reason is ErrorReason.KV_INCOMPATIBLE
    assert message == f"the KV was made with {name} {theirs!r}, not {ours!r}"


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"epoch": ""}, ErrorReason.KV_INCOMPATIBLE, "no epoch"),
        ({"handle_id": ""}, ErrorReason.KV_INCOMPATIBLE, "no id"),
        (
            {"descriptor": GrpcDescriptor("t", "e", "h", (1,))},
            ErrorReason.KV_INCOMPATIBLE,
            "transport grpc cannot",
        ),
        ({"num_tokens": 4}, ErrorReason.KV_DIGEST_MISMATCH, "covers 4 tokens, the prompt has 3"),
        ({"digest": b""}, ErrorReason.KV_DIGEST_MISMATCH, "digest"),
        ({"lease_expiry": NOW}, ErrorReason.KV_EXPIRED, "ended 0.000 s ago"),
        ({"lease_expiry": NOW - 2}, ErrorReason.KV_EXPIRED, "ended 2.000 s ago"),
        ({"lease_expiry": float("-inf")}, ErrorReason.KV_EXPIRED, "ended"),
    ],
)
def test_an_unsound_handle_is_refused(
    change: dict[str, object], reason: ErrorReason, words: str
) -> None:
    told, message = refusal(replace(HANDLE, **change))  # type: ignore[arg-type]
    assert told is reason
    assert words in message


@pytest.mark.parametrize(
    "request_", [replace(REQUEST, token_ids=(1, 2, 4)), replace(REQUEST, cache_salt="other")]
)
def test_kv_of_another_prompt_or_salt_is_refused(request_: EngineRequest) -> None:
    assert refusal(HANDLE, request_)[0] is ErrorReason.KV_DIGEST_MISMATCH


def test_a_handle_is_good_once() -> None:
    verifier = HandleVerifier(ENGINE)
    verifier.use(HANDLE, REQUEST, NOW)
    assert refusal(HANDLE, verifier=verifier)[0] is ErrorReason.KV_REUSED


def test_a_refused_handle_is_not_used_up() -> None:
    verifier = HandleVerifier(ENGINE)
    refusal(HANDLE, replace(REQUEST, token_ids=(9, 9, 9)), verifier)
    verifier.use(HANDLE, REQUEST, NOW)
    assert verifier.remembered == 1


def test_used_handles_are_forgotten_when_they_expire() -> None:
    verifier = HandleVerifier(ENGINE)
    verifier.use(HANDLE, REQUEST, NOW)
    with pytest.raises(DecodeError) as caught:
        verifier.use(HANDLE, REQUEST, NOW + 31)
    assert caught.value.reason is ErrorReason.KV_EXPIRED
    later = replace(HANDLE, handle_id="later", lease_expiry=NOW + 60)
    verifier.use(later, REQUEST, NOW + 31)
    assert verifier.remembered == 1


def test_memory_of_used_handles_is_bounded() -> None:
    verifier = HandleVerifier(ENGINE, max_remembered=2)
    for number in range(5):
        verifier.use(replace(HANDLE, handle_id=str(number)), REQUEST, NOW)
    assert verifier.remembered == 2
    assert refusal(replace(HANDLE, handle_id="4"), verifier=verifier)[0] is ErrorReason.KV_REUSED
