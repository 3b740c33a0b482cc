"""The ledger: settled is settled, posted once, on both databases."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from coordinator.gateway import ledger as ledger_module
from coordinator.gateway import ledger_store
from coordinator.gateway.charge import Charge, to_line
from coordinator.gateway.journal import Journal
from coordinator.gateway.ledger import Ledger, LedgerMetrics
from coordinator.gateway.ledger_store import LedgerError, LedgerStore
from coordinator.gateway.usage import (
    columns_of_groups,
    columns_of_requests,
    of_groups,
    of_requests,
)
from coordinator.policy.pricing import cost_nano
from pdserve.config_ledger import MAX_PRICE, LedgerConfig, Prices
from pdserve.errors import ConfigError
from tests.support.patience import WITHIN_S, happens
from tests.support.postgres import binaries, postgres
from tests.unit.test_pricing import charge, record

DATABASES = ("sqlite",) if binaries() is None else ("sqlite", "postgresql")
DAY_US = 86_400_000_000
FOREVER = (0, 2**62)


@pytest.fixture(scope="module")
def fresh_url() -> Iterator[Callable[[], str]]:
    with postgres() as server:
        yield server.fresh_url


@pytest.fixture(params=DATABASES)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerConfig:
    url = None if request.param == "sqlite" else request.getfixturevalue("fresh_url")()
    return LedgerConfig(folder=tmp_path, url=url)


@pytest.fixture
def store(config: LedgerConfig) -> Iterator[LedgerStore]:
    made = LedgerStore(config)
    yield made
    made.close()


def charges(*ids: str, **fields: object) -> list[Charge]:
    return [replace(charge(record()), charge_id=each, **fields) for each in ids]  # type: ignore[arg-type]


def ids(found: list[Charge]) -> list[str]:
    return sorted(each.charge_id for each in found)


def written(config: LedgerConfig, *lines: bytes) -> None:
    """What a process leaves in the journal that is killed."""
    assert config.folder is not None
    journal = Journal(config.folder / "journal")
    for line in lines:
        journal.append(line)
    journal.close()


def left_in_journal(folder: Path) -> list[str]:
    files = folder.glob("journal/*.jsonl")
    return [line for file in files for line in file.read_text().splitlines()]


class Kept:
    """A ledger and its metrics."""

    def __init__(self, config: LedgerConfig, now: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self.ledger = Ledger(
            config, {"tiny": Prices(prefill=3.6, decode=7.2)}, LedgerMetrics(self.registry), now
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pdserve_{name}", labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        """What a thread does is looked for."""

        async def so() -> bool:
            return condition()

        assert await happens(so, WITHIN_S)


async def test_what_ended_is_settled_at_once_and_posted_once(
    config: LedgerConfig, store: LedgerStore
) -> None:
    kept = Kept(config, lambda: 7.5)
    kept.ledger.ended(record(), None, 0.0)
    assert kept.metric("ledger_entries_total", state="settled") == 1
    (settled,) = await kept.ledger.entries(*FOREVER)
    assert settled == replace(charge(record()), charge_id=settled.charge_id, at_us=7_500_000)
    kept.ledger.ended(record(), None, 0.0)  # of the same request id
    await kept.ledger.close()
    assert len({each.charge_id for each in store.entries(*FOREVER)}) == 2
    assert kept.metric("ledger_entries_total", state="posted") == 2
    labels = {"model": "tiny", "mode": "disaggregated", "arm": "blue"}
    assert kept.metric("cost_total", phase="decode", **labels) == pytest.approx(0.00364)
    assert kept.metric("charged_gpu_seconds_total", phase="prefill", **labels) == pytest.approx(
        0.3592
    )


async def test_what_a_killed_process_left_is_posted_by_the_next(
    config: LedgerConfig, store: LedgerStore
) -> None:
    one, two, torn = (to_line(each) for each in charges("one", "two", "torn"))
    store.add(charges("one"))  # killed after the commit, before the journal was told
    written(config, one, two, torn[:40])
    kept = Kept(config)
    running = asyncio.create_task(kept.ledger.run())
    await kept.until(lambda: kept.metric("ledger_entries_total", state="posted") == 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await kept.ledger.close()
    assert ids(store.entries(*FOREVER)) == ["one", "two"]
    assert config.folder is not None
    assert not left_in_journal(config.folder)


async def test_a_database_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RETRY_S", (0.001, 0.001))
    now = 100.0
    (tmp_path / "ledger.sqlite3").mkdir()  # no database can be there
    kept = Kept(LedgerConfig(folder=tmp_path), lambda: now)
    running = asyncio.create_task(kept.ledger.run())
    kept.ledger.ended(record(), None, 0.0)
    await kept.until(lambda: kept.metric("ledger_failures_total") >= 2)
    now = 103.0
    assert kept.metric("ledger_lag_seconds") == 3.0
    with pytest.raises(LedgerError):
        await kept.ledger.sums("tenant", *FOREVER)
    (tmp_path / "ledger.sqlite3").rmdir()
    await kept.until(lambda: kept.metric("ledger_lag_seconds") == 0)
    assert len(await kept.ledger.entries(*FOREVER)) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await kept.ledger.close()


async def test_without_its_database_it_ends_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").mkdir()
    kept = Kept(LedgerConfig(folder=tmp_path))
    kept.ledger.ended(record(), None, 0.0)
    await kept.ledger.close()
    assert len(left_in_journal(tmp_path)) == 1


async def test_a_charge_that_cannot_be_written_down_harms_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(LedgerConfig(folder=tmp_path))
    kept.ledger.ended(record(), None, 0.0)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:10]))  # as a full disk
        kept.ledger.ended(record(), None, 0.0)
    kept.ledger.ended(record(), None, 0.0)
    assert kept.metric("ledger_entries_total", state="lost") == 1
    assert len(await kept.ledger.entries(*FOREVER)) == 2  # what comes later is whole
    await kept.ledger.close()


def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(ConfigError, match="another coordinator uses"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists"):
        Journal(tmp_path / "file")


def test_files_are_taken_in_order_also_by_the_next_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(b"1\n")
    journal.append(b"2\n")
    (first,) = journal.take()
    journal.append(b"3\n")
    journal.close()
    journal = Journal(tmp_path)
    journal.append(b"4\n")
    files = journal.take()
    assert files[0] == first
    assert [file.read_bytes() for file in files] == [b"1\n2\n", b"3\n", b"4\n"]
    journal.done(first)
    assert journal.take() == files[1:]
    journal.close()


def test_sums(store: LedgerStore) -> None:
    store.add(
        [
            *charges("a", "b", tenant="acme", at_us=DAY_US - 1),
            *charges("c", tenant="", at_us=DAY_US),
        ]
    )
    acme = store.sums("tenant", *FOREVER)[1]
    assert (acme.group, acme.requests, acme.prompt_tokens, acme.completion_tokens) == (
        "acme",
        2,
        2000,
        200,
    )
    assert (acme.prefill_nano, acme.decode_nano) == (359_200, 3_640_000)
    assert acme.decode_gpu_s == pytest.approx(1.82)
    assert [(each.group, each.requests) for each in store.sums("day", *FOREVER)] == [(0, 2), (1, 1)]
    assert [each.requests for each in store.sums("mode", 0, DAY_US)] == [2]
    assert ids(store.entries(DAY_US - 1, DAY_US)) == ["a", "b"]
    assert store.sums("model", 5, 6) == []


def test_too_many_entries_are_refused(store: LedgerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_store, "MAX_ENTRIES", 2)
    store.add(charges("a", "b"))
    assert len(store.entries(*FOREVER)) == 2
    store.add(charges("c"))
    with pytest.raises(LedgerError, match="more than 2"):
        store.entries(*FOREVER)


def test_several_may_start_at_once(config: LedgerConfig) -> None:
    """Coordinators of one PostgreSQL; of SQLite, threads of one."""
    made = [LedgerStore(config) for _ in range(4 if config.url else 1)]
    stores = made * (4 // len(made))
    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(lambda store: store.add(charges("a", "b")), stores))
    assert ids(stores[0].entries(*FOREVER)) == ["a", "b"]
    for store in made:
        store.close()


def test_a_ledger_of_another_version_is_not_touched(
    config: LedgerConfig, store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(charges("a"))
    monkeypatch.setattr(ledger_store, "SHAPE", 2)
    later = LedgerStore(config)
    with pytest.raises(LedgerError, match="another version"):
        later.add(charges("b"))
    later.close()
    assert ids(store.entries(*FOREVER)) == ["a"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://h/d", "must begin with postgresql://"),
        ("postgresql://u:secret@h/d", "PGPASSWORD"),
    ],
)
def test_urls_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LedgerConfig(url=url)


def test_columns_are_those_of_the_rows(store: LedgerStore) -> None:
    store.add(charges("a"))
    for by in ledger_store.GROUPS:
        (row,) = of_groups(by, store.sums(by, *FOREVER))
        assert list(row) == columns_of_groups(by)
    (row,) = of_requests(store.entries(*FOREVER))
    assert list(row) == columns_of_requests()


def test_the_dearest_charge_that_can_be_configured_is_kept(store: LedgerStore) -> None:
    """A day of a hundred GPUs for one answer."""
    nano = cost_nano(100 * 86_400, MAX_PRICE)
    store.add(charges("a", prefill_nano=nano, decode_nano=nano))
    (sums,) = store.sums("tenant", *FOREVER)
    assert sums.prefill_nano == nano == 2_400_000_000 * 10**9
    for price in (2 * MAX_PRICE, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="prefill"):
            Prices(prefill=price)


def test_a_database_in_a_file_is_its_owners(tmp_path: Path) -> None:
    store = LedgerStore(LedgerConfig(folder=tmp_path))
    store.add(charges("a"))
    assert {oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {"0o600"}
    store.close()


def test_rows_tell_costs_and_means(store: LedgerStore) -> None:
    store.add(charges("a", "b", at_us=DAY_US))
    (row,) = of_groups("day", store.sums("day", *FOREVER))
    assert (row["day"], row["requests"]) == ("1970-01-02", 2)
    assert row["cost"] == pytest.approx(0.0039992)
    assert row["cost_per_request"] == pytest.approx(0.0019996)
    assert row["cost_per_million_tokens"] == pytest.approx(0.0039992 / 2200 * 1e6)
    (first, _) = of_requests(store.entries(*FOREVER))
    assert (first["at"], first["request_id"]) == ("1970-01-02T00:00:00+00:00", "r1")
    assert first["cost"] == pytest.approx(0.0019996)
