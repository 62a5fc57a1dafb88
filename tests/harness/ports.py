"""Ports of the loopback that nobody else gets meanwhile: one that refuses, one for a process that is to listen there.

A port that was looked up and let go may be another's before it is used. Bound, it is not given away, yet refuses connections;
bound with SO_REUSEADDR, which servers set too, it lets a server listen there.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """Connections to it are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """For a server; connections are refused whenever none listens there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
