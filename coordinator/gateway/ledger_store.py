"""The ledger's database: charges by their id, and their sums.

One table, made where it is missing. There has been one shape of it so far, and a number beside
it says which, so that a later version knows what it finds and this one refuses what it does not
know: a tool for migrations will be needed with the second shape, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, get_type_hints

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.gateway.charge import Charge
from pdserve.config_ledger import LedgerConfig

SHAPE = 1
DAY_US = 86_400_000_000
MAX_ENTRIES = 100_000
"""Single entries that are given out at once."""
_LOCK_WAIT_S = 30
_CONNECT_WAIT_S = 5

_metadata = sa.MetaData()
_types: Mapping[type, type[sa.types.TypeEngine[Any]]] = {
    str: sa.Text,
    int: sa.BigInteger,
    float: sa.Double,
}
charges = sa.Table(
    "pdserve_charges",
    _metadata,
    *(
        sa.Column(name, _types[kind], primary_key=name == "charge_id", nullable=False)
        for name, kind in get_type_hints(Charge).items()
    ),
)
sa.Index("pdserve_charges_at", charges.c.at_us)
_shape = sa.Table("pdserve_ledger", _metadata, sa.Column("shape", sa.Integer, nullable=False))
_INSERT: Mapping[str, Callable[..., Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_SUMMED = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "prefill_gpu_s",
    "decode_gpu_s",
    "prefill_nano",
    "decode_nano",
)
_GROUPS: Mapping[str, sa.ColumnElement[Any]] = {
    **{
        name: charges.c[name]
        for name in ("tenant", "key_id", "model", "mode", "arm", "surface", "outcome")
    },
    "day": sa.cast(sa.func.floor(charges.c.at_us / sa.literal(float(DAY_US))), sa.BigInteger),
}
GROUPS: Sequence[str] = tuple(_GROUPS)


class LedgerError(Exception):
    """The database cannot be used; in one line."""


class TooManyEntriesError(LedgerError):
    """More were asked for than are given out at once."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What the charges of one group add up to. `group` is the value that they share, of days
    their number since the Unix epoch."""

    group: str | int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefill_gpu_s: float
    decode_gpu_s: float
    prefill_nano: int
    decode_nano: int


class LedgerStore:
    """Blocking; may be used by several threads. Every method raises LedgerError, or OSError where
    the file of a database cannot be had."""

    def __init__(self, config: LedgerConfig) -> None:
        """Connects to nothing yet."""
        assert config.folder is not None
        self._file = None if config.url else config.folder / "ledger.sqlite3"
        self._engine = _engine(config.url, self._file)
        self._insert = _INSERT[self._engine.dialect.name](charges).on_conflict_do_nothing(
            index_elements=[charges.c.charge_id]
        )
        self._ready = False
        self._preparing = Lock()

    def add(self, new: Sequence[Charge]) -> None:
        """Those that are there already change nothing; when it returns, the others are there
        for good."""
        if not new:
            return
        with _told():
            self._prepare()
            with self._engine.begin() as connection:
                connection.execute(self._insert, [asdict(charge) for charge in new])

    def sums(self, by: str, since_us: int, until_us: int) -> list[Sums]:
        """Of charges from `since_us` to before `until_us`, by one of GROUPS, in its order."""
        group = _GROUPS[by].label("group")
        summed = (sa.func.sum(charges.c[name]) for name in _SUMMED)
        query = sa.select(group, sa.func.count(), *summed).where(_within(since_us, until_us))
        with _told():
            self._prepare()
            with self._engine.connect() as connection:
                rows = connection.execute(query.group_by(group).order_by(group)).all()
        return [_sums(row) for row in rows]

    def entries(self, since_us: int, until_us: int) -> list[Charge]:
        """The charges themselves, by time; more than MAX_ENTRIES raise TooManyEntriesError."""
        query = sa.select(charges).where(_within(since_us, until_us))
        with _told():
            self._prepare()
            with self._engine.connect() as connection:
                rows = connection.execute(
                    query.order_by(charges.c.at_us).limit(MAX_ENTRIES + 1)
                ).all()
        if len(rows) > MAX_ENTRIES:
            raise TooManyEntriesError(f"more than {MAX_ENTRIES:,} entries: ask for a shorter time")
        return [Charge(**row._mapping) for row in rows]

    def close(self) -> None:
        self._engine.dispose()

    def _prepare(self) -> None:
        """Makes the tables, once. Raises LedgerError for those of another version."""
        with self._preparing:
            if not self._ready:
                self._make()
            self._ready = True

    def _make(self) -> None:
        if self._file is not None:
            self._file.touch(mode=0o600)  # who uses what is its owner's to know
        with self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":  # two coordinators may start at once
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(7365727665)"))
            _metadata.create_all(connection)
            shapes: Iterable[int] = connection.execute(sa.select(_shape.c.shape)).scalars().all()
            if not shapes:
                connection.execute(_shape.insert().values(shape=SHAPE))
        if any(shape != SHAPE for shape in shapes):
            raise LedgerError(f"the ledger is of another version: its shape is {max(shapes)}")


def _within(since_us: int, until_us: int) -> sa.ColumnElement[bool]:
    return sa.and_(charges.c.at_us >= since_us, charges.c.at_us < until_us)


def _sums(row: Sequence[Any]) -> Sums:
    # PostgreSQL adds whole numbers up to decimals.
    kinds: list[Callable[[Any], Any]] = list(get_type_hints(Sums).values())[1:]
    numbers = (kind(value) for kind, value in zip(kinds, row[1:], strict=True))
    return Sums(row[0], *numbers)


class _told:
    """What SQLAlchemy raises inside becomes a LedgerError, without statements and values."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sa.exc.SQLAlchemyError):
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            raise LedgerError(" ".join(str(cause).split())) from error


def _engine(url: str | None, file: Path | None) -> sa.Engine:
    if url is not None:
        of_driver = sa.make_url(url).set(drivername="postgresql+psycopg")
        # A connection that the database ended meanwhile is no failure.
        return sa.create_engine(
            of_driver,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _CONNECT_WAIT_S,
                "options": f"-c statement_timeout={_LOCK_WAIT_S * 1000}",
            },
        )
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(file)), connect_args={"timeout": _LOCK_WAIT_S}
    )

    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")  # readers do not hold up the writer
        connection.execute("PRAGMA synchronous=FULL")  # what was committed survives a power cut

    return engine
