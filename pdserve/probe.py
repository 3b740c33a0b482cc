"""Whether a server could listen on an address now; a moment later may be another matter."""

from __future__ import annotations

import socket

from pdserve.config import Listen


def probe(listen: Listen) -> None:
    """Binds the address as servers do, and lets it go. Raises OSError when it cannot be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probing:
        # A port that has only connections in TIME_WAIT is free.
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probing.bind(address)
        # Two sockets may be bound to one address as long as neither listens.
        probing.listen(1)
