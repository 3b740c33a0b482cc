"""A PostgreSQL server of the tests' own, where its binaries are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from cli import ports

_ROOT_S_STAND_IN = "postgres"
"""The server refuses to be root; Debian's package makes this user."""


def binaries() -> Path | None:
    """The newest server's; None where there is none."""
    found = shutil.which("initdb")
    candidates = [Path(found)] if found else []
    candidates += Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return (
        max(candidates, key=lambda path: path.parts, default=Path("/")).parent
        if (candidates)
        else None
    )


class Postgres:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._numbers = count()

    def fresh_url(self) -> str:
        """Of a database that nobody has used."""
        name = f"t{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://pdserve@127.0.0.1:{self._port}/{database}"


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Needs `binaries()`. It and its data are gone afterwards."""
    found = binaries()
    assert found is not None
    folder = Path(tempfile.mkdtemp(prefix="pdserve-pg-"))
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = pwd.getpwnam(_ROOT_S_STAND_IN)
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = folder / "data"
    (port,) = ports.pick(1)
    init = [found / "initdb", "-D", data, "-U", "pdserve", "-A", "trust", "--no-sync", "-E", "UTF8"]
    control = [found / "pg_ctl", "-D", data, "-w", "-t", "120", "-l", folder / "log"]
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    try:
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, cwd=folder, **who)
        subprocess.run(
            [*control, "-o", options, "start"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            **who,
        )
        try:
            yield Postgres(port)
        finally:
            stop = [*control, "-m", "immediate", "stop"]
            subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, cwd=folder, **who)
    finally:
        shutil.rmtree(folder)
