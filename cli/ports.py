"""Which TCP ports are free on this machine. What is free now may not be a moment later."""

from __future__ import annotations

import contextlib
import errno
import socket

from pdserve.config import LOOPBACK, Listen
from pdserve.errors import ConfigError


def check(listen: Listen, flag: str) -> None:
    """Raises ConfigError if no server could listen there; `flag` is what sets the port."""
    try:
        _bind(listen)
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
        _bind(Listen(port=port))
    except OSError:
        return False
    return True


def pick(count: int) -> list[int]:
    """Different free ports on the loopback address."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _bind(listen: Listen) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port that has only connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
