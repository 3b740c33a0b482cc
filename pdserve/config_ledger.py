"""Configuration of what is charged, and where charges are kept."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pdserve.section import Name, Section

MAX_PRICE = 1_000_000.0
"""So that a charge in billionths fits into the 64 bits that databases have for it."""


class Prices(Section):
    """What an hour of one GPU costs, in the ledger's currency; on CPU, of one rank of a worker."""

    prefill: float = Field(
        default=0.0,
        ge=0,
        le=MAX_PRICE,
        description="an hour of one GPU of a worker that only reads prompts",
    )
    decode: float = Field(
        default=0.0,
        ge=0,
        le=MAX_PRICE,
        description="the same of one that writes answers, or does both",
    )


class LedgerConfig(Section):
    """Where each request's charge is kept. Several coordinators need a folder each and one url."""

    folder: Path | None = Field(
        default=None,
        description="where charges are written down, and kept where no url is given; this "
        "coordinator's own, on a local disk; none: nothing is charged",
    )
    url: str | None = Field(
        default=None,
        description="postgresql://USER@HOST/DATABASE, where charges are kept; none: SQLite in the "
        "folder",
    )
    currency: Name = Field(default="USD", description="of all prices; shown, never converted")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme != "postgresql":
            raise ValueError("must begin with postgresql://")
        if parts.password is not None:
            # The configuration is printed at start.
            raise ValueError("no password may be in it: put it into PGPASSWORD or a passfile")
        return url
