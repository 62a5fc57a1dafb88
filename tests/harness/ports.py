"""Loopback ports that no other process can get: one refuses, one is for a server.

A port that was looked up and released may belong to another process before it is used.
A bound port is not given away, yet refuses connections.
A port bound with SO_REUSEADDR, which servers also set, lets a server listen there.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """Hold a port that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a port for a server; it refuses connections while no server listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
