"""How a configuration says where workers are: a fixed address, a DNS name, a watched file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DNS = "dns:"
_FILE = "file:"
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class FixedAddress:
    """`address` is host:port; a host name is resolved whenever a connection is made."""

    address: str


@dataclass(frozen=True, slots=True)
class DnsName:
    """Every address that the name has is a worker; of a headless Kubernetes service, a pod."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class WatchedFile:
    """A YAML or JSON list of host:port."""

    path: Path


WorkerSource = FixedAddress | DnsName | WatchedFile


def parse_source(text: str) -> WorkerSource:
    """Raises ValueError in words that show what is accepted."""
    if text.startswith(_FILE):
        if not (path := text.removeprefix(_FILE)):
            raise ValueError("file: names no file; write file:/path/to/workers.yaml")
        return WatchedFile(Path(path))
    name, port = _split(text.removeprefix(_DNS))
    return DnsName(name, port) if text.startswith(_DNS) else FixedAddress(text)


def parse_address(text: object) -> str:
    """host:port as it stands. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not host:port")
    _split(text)
    return text


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    bare = not host.startswith("[") and ":" in host
    if not (colon and host and port.isascii() and port.isdigit()) or bare or "/" in text:
        raise ValueError(
            f"{text!r} is not host:port; a worker is host:port, dns:NAME:PORT or file:PATH"
        )
    if not 0 < int(port) <= _MAX_PORT:
        raise ValueError(f"{text!r}: the port must be 1 to {_MAX_PORT}")
    return host, int(port)
