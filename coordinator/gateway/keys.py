"""API keys: who a caller is. The file holds hashes alone; a key is shown once, when it is made."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import limits
import yaml
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.policy.ticket import Priority
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.section import Name, in_words

_PREFIX = "pd-"
_HASH_PREFIX = "blake3:"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may do. `rate` of None means the gateway's default, `weight` is
    the tenant's part beside others where requests wait.

    Without keys everybody is one anonymous caller, whose tenant and key_id are empty.
    """

    tenant: str
    key_id: str
    admin: bool
    may_choose_mode: bool
    rate: str | None
    weight: float = 1.0
    max_priority: Priority = Priority.NORMAL


class KeyEntry(BaseModel):
    """One key as the file has it. `rate` is as in "600/minute"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Name
    tenant: Name
    # An unsalted fast hash is enough: a key has 256 random bits, there is nothing to guess.
    hash: str = Field(pattern=f"^{_HASH_PREFIX}[0-9a-f]{{64}}$")
    admin: bool = False
    may_choose_mode: bool = True
    rate: str | None = None
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_priority: Priority = Priority.NORMAL

    @field_validator("rate")
    @classmethod
    def _check_rate(cls, rate: str | None) -> str | None:
        if rate is not None:
            limits.parse(rate)
        return rate


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[KeyEntry, ...]

    @field_validator("keys")
    @classmethod
    def _check_ids(cls, keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        for key_id, count in Counter(key.id for key in keys).items():
            if count > 1:
                raise ValueError(f"two keys share the id {key_id!r}")
        return keys


_ANYBODY = Caller(
    tenant="",
    key_id="",
    admin=True,
    may_choose_mode=True,
    rate=None,
    max_priority=Priority.HIGH,
)


class KeyRing:
    """The keys that are good here, or none at all: then everybody may call."""

    def __init__(self, entries: Iterable[KeyEntry] | None, anybody: Caller = _ANYBODY) -> None:
        """`anybody` is who calls where there are no keys, `entries` of None."""
        self._anybody = anybody
        self._callers: list[tuple[bytes, Caller]] | None = None
        if entries is not None:
            self._callers = [(_digest_of(entry), _caller(entry)) for entry in entries]

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Raises ConfigError, in one line, for a file that cannot be used."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            return cls(_KeyFile.model_validate(content).keys)
        except OSError as error:
            raise ConfigError(f"keys file {path}: {error.strerror}") from None
        except ValidationError as error:
            raise ConfigError(f"keys file {path}: {in_words(error)}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"keys file {path}: {' '.join(str(error).split())}") from None

    @classmethod
    def open_to_all(cls, *, admin: bool = True) -> KeyRing:
        """`admin` says whether anybody may see the fleet, as one's own machine may."""
        return cls(None, replace(_ANYBODY, admin=admin))

    @property
    def is_open(self) -> bool:
        return self._callers is None

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind "Bearer KEY"; without keys, any header and none will do.

        Raises RejectedError UNAUTHENTICATED.
        """
        if self._callers is None:
            return self._anybody
        if not authorization:
            raise _unauthenticated("no API key: send it as 'Authorization: Bearer KEY'")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated("the Authorization header must be 'Bearer KEY'")
        presented = blake3(key.strip().encode()).digest()
        found = None
        # Every entry is compared, whatever matched, so that the time tells nothing.
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None:
            raise _unauthenticated("the API key is not known")
        return found


def new_key(
    tenant: str,
    *,
    admin: bool = False,
    may_choose_mode: bool = True,
    rate: str | None = None,
    weight: float = 1.0,
    max_priority: Priority = Priority.NORMAL,
) -> tuple[str, KeyEntry]:
    """A fresh key in plain text, to be shown once, and its entry for the file.

    Raises pydantic's ValidationError for a field that cannot be so.
    """
    plain = _PREFIX + secrets.token_urlsafe(32)
    entry = KeyEntry(
        id=secrets.token_hex(4),
        tenant=tenant,
        hash=_HASH_PREFIX + blake3(plain.encode()).hexdigest(),
        admin=admin,
        may_choose_mode=may_choose_mode,
        rate=rate,
        weight=weight,
        max_priority=max_priority,
    )
    return plain, entry


def _digest_of(entry: KeyEntry) -> bytes:
    return bytes.fromhex(entry.hash.removeprefix(_HASH_PREFIX))


def _caller(entry: KeyEntry) -> Caller:
    return Caller(
        entry.tenant,
        entry.id,
        entry.admin,
        entry.may_choose_mode,
        entry.rate,
        entry.weight,
        entry.max_priority,
    )


def _unauthenticated(message: str) -> RejectedError:
    return RejectedError(ErrorReason.UNAUTHENTICATED, message)
