"""What operators look up: a request by its name, and what was used when."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.gateway.charge import Charge
from coordinator.gateway.ledger_store import LedgerError, Sums, TooManyEntriesError
from coordinator.ops import Ops
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.types import Role
from tests.support.core import running
from tests.support.fake_worker import FakeWorker
from tests.support.virtual_time import on_virtual_time


def decode(**info: Any) -> FakeWorker:
    return FakeWorker("d", Role.DECODE, **info)


class Unreadable:
    """A ledger that cannot be read, for a reason."""

    currency = "USD"

    def __init__(self, why: Exception) -> None:
        self._why = why

    async def entries(self, since_us: int, until_us: int) -> list[Charge]:
        raise self._why

    async def sums(self, by: str, since_us: int, until_us: int) -> list[Sums]:
        raise self._why


@on_virtual_time
async def test_a_request_is_found_by_how_its_id_begins() -> None:
    async with running(decode()) as core:
        await core.ask()
        assert core.ops.request("r")["request_id"] == "r1"
        await core.ask()
        with pytest.raises(RejectedError, match=r"'r' may be any of 2 requests.*r2") as refused:
            core.ops.request("r")
        assert refused.value.reason is ErrorReason.INVALID_ARGUMENT
        with pytest.raises(RejectedError, match="no request 'x' is remembered") as refused:
            core.ops.request("x")
        assert refused.value.reason is ErrorReason.NOT_FOUND


@pytest.mark.parametrize("by", ["tenant", "request"])
@pytest.mark.parametrize(
    ("why", "reason", "words"),
    [
        (TooManyEntriesError("ask for less"), ErrorReason.INVALID_ARGUMENT, "ask for less"),
        (LedgerError("no such host"), ErrorReason.LEDGER_UNAVAILABLE, "cannot be read now"),
        (OSError("read-only"), ErrorReason.LEDGER_UNAVAILABLE, "cannot be read now"),
    ],
)
@on_virtual_time
async def test_a_ledger_that_cannot_be_read_says_what_its_reader_can_do(
    by: str, why: Exception, reason: ErrorReason, words: str
) -> None:
    async with running(decode()) as core:
        ops = Ops(
            core.models, core.fleet, core.gateway, core.metrics, core.timelines, core.experiments,
            ledger=Unreadable(why),  # type: ignore[arg-type]
        )  # fmt: skip
        with pytest.raises(PdserveError, match=words) as refused:
            await ops.usage(by, 0, 1)
        assert refused.value.reason is reason
        assert reason.value.http < 500 or refused.value.retry_after_s == 10.0
