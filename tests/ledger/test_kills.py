"""A coordinator that is killed loses no settled charge, and none is charged twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ledger.run import Killing
from tests.support.postgres import binaries, postgres

KILLS = 3


@pytest.fixture(params=("sqlite",) if binaries() is None else ("sqlite", "postgresql"))
def url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    with ExitStack() as stack:
        is_server = request.param == "postgresql"
        yield stack.enter_context(postgres()).fresh_url() if is_server else None


async def test_no_settled_charge_is_lost_and_none_is_made_twice(
    tmp_path: Path, url: str | None
) -> None:
    audit = await Killing(tmp_path, url, seed=1).run(KILLS)
    assert audit.faults == []
    assert audit.kills == KILLS
    assert len(audit.told) >= KILLS
