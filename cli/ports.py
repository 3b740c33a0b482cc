"""Which TCP ports are free on this machine. What is free now may not be a moment later."""

from __future__ import annotations

import errno
import random
from pathlib import Path

from pdserve.config import Listen
from pdserve.errors import ConfigError
from pdserve.probe import probe

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_LEAST_CHOICE = 1_000
"""Ports to choose from at least, where the kernel's own range begins early."""


def check(listen: Listen, flag: str) -> None:
    """Raises ConfigError if no server could listen there; `flag` is what sets the port."""
    try:
        probe(listen)
    except OSError as error:
        what = f"port {listen.port} on {listen.host}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{what} is already in use: choose another with {flag}") from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"{what} is for root alone: choose one above 1023 with {flag}"
            ) from None
        raise ConfigError(f"cannot listen on {listen.host}: {error.strerror}") from None


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    try:
        probe(Listen(port=port))
    except OSError:
        return False
    return True


def pick(count: int) -> list[int]:
    """Different free ports on the loopback address, below those that the kernel gives out.

    A port that the kernel may give to any outgoing connection could be taken in the moment in
    which a worker starts again, and stay so for a minute.
    """
    candidates = range(_FIRST_PORT, _first_ephemeral_port())
    picked: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        if len(picked) == count:
            return picked
        if is_free(port):
            picked.append(port)
    raise ConfigError(f"fewer than {count} ports from {_FIRST_PORT} on are free")


def _first_ephemeral_port() -> int:
    try:
        low = int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except OSError:  # not Linux: the range that IANA sets aside
        return 49_152
    return max(low, _FIRST_PORT + _LEAST_CHOICE)
