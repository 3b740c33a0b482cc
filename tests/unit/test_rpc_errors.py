"""What a status that came damaged tells: no more than its code, and never an exception."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pdserve.errors import ErrorReason, RejectedError
from pdserve.rpc_errors import from_rpc_error, to_status


class Refusal(grpc.RpcError):
    """As gRPC raises it: an error with the methods of a call."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "x"

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", self._details),)


def status(info: error_details_pb2.ErrorInfo, damage: bytes | None = None) -> bytes:
    message = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="x")
    message.details.add().Pack(info)
    if damage is not None:
        message.details[0].value = damage
    whole: bytes = message.SerializeToString()
    return whole


FOREIGN = error_details_pb2.ErrorInfo(reason="KV_FOREIGN", domain="pdserve")


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (status(FOREIGN), ErrorReason.KV_FOREIGN),
        (b"\xff\xff\xff\xff", ErrorReason.DECODE_FAILED),
        (status(FOREIGN, damage=b"\xff\xff\xff"), ErrorReason.DECODE_FAILED),
    ],
    ids=["sound", "no status", "no detail"],
)
def test_damage_leaves_the_code(details: bytes, reason: ErrorReason) -> None:
    assert from_rpc_error(Refusal(details), ErrorReason.DECODE_FAILED).reason is reason


def test_a_time_that_is_none_is_left_out() -> None:
    info = error_details_pb2.ErrorInfo(
        reason="NO_ROOM", domain="pdserve", metadata={"retry_after_s": "soon"}
    )
    told = from_rpc_error(Refusal(status(info)), ErrorReason.DECODE_FAILED)
    assert (told.reason, told.retry_after_s) == (ErrorReason.NO_ROOM, None)


def test_when_to_come_back_is_told_as_google_apis_tell_it() -> None:
    made = to_status(RejectedError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.25))
    _, retry = status_pb2.Status.FromString(made.trailing_metadata[0][1]).details
    info = error_details_pb2.RetryInfo()
    assert retry.Unpack(info)
    assert info.retry_delay.ToMilliseconds() == 1250
