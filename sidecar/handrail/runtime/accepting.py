"""Accept the connections of one listener, within the bounds of its gate.

asyncio's own servers accept every connection; when no descriptor is left they log an error each second and go on as before. Here,
accepting pauses before the last descriptor, and a connection over a bound is reset at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

from handrail.runtime.connections import Refusal

BACKLOG: Final = 1024
ACCEPTS_A_TURN: Final = 8  # then the loop serves those that are connected
PAUSE_S: Final = 0.25
_RESET: Final = struct.pack("ii", 1, 0)
_GONE: Final = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})  # accept(2)

Taken = Callable[[socket.socket, str], None]
"""Take over one non-blocking connection from an address.

It calls ``gate.leave`` with that address once the connection is closed.
"""


class ConnectionGate(Protocol):
    """Admission of connections: ``connections.Gate``, or the proxy's ``Admission``.

    The acceptor calls it before and after it accepts.
    """

    def has_room(self) -> bool:
        """Whether one more connection may be accepted now."""

    def shortage(self) -> str:
        """Name of the resource that is short where there is no room."""

    def admit(self, peer: str) -> Refusal | None:
        """Admit an accepted connection, or return the refusal: then it is reset."""

    def pause(self, why: str) -> None:
        """Note that accepting pauses."""

    def resume(self) -> None:
        """Note that accepting goes on."""


class Acceptor:
    """Acceptor on one address.

    ``close`` works without ``start`` and twice. It belongs to the loop that called ``start``.
    """

    def __init__(self, gate: ConnectionGate, taken: Taken) -> None:
        self._gate = gate
        self._taken = taken
        self._sockets: list[socket.socket] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, host: str, port: int) -> tuple[str, int]:
        """Bind, listen and accept; return the address.

        Port 0: a free one. Raises ``OSError`` when the address cannot be bound.
        """
        self._sockets = listening(host, port)
        self._watch()
        address = self._sockets[0].getsockname()
        return str(address[0]), int(address[1])

    def close(self) -> None:
        """Stop listening; accepted connections stay."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        else:
            self._unwatch()
        for each in self._sockets:
            each.close()
        self._sockets = []
        self._gate.resume()

    def wake(self) -> None:
        """Try again to accept before the pause is over, since there may be room."""
        if self._timer is not None and self._gate.has_room():
            self._timer.cancel()
            self._watch()

    def _watch(self) -> None:
        self._timer = None
        self._gate.resume()
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.add_reader(each.fileno(), self._accept, each)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each.fileno())

    def _pause(self, why: str) -> None:
        """Pause for a moment.

        A connection that waits would otherwise wake the loop again and again.
        """
        self._unwatch()
        self._gate.pause(why)
        self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._watch)

    def _accept(self, listener: socket.socket) -> None:
        gate = self._gate
        for _ in range(ACCEPTS_A_TURN):
            if not gate.has_room():
                self._pause(gate.shortage())
                return
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                self._pause(error.strerror or str(error))
                return
            peer = peer_of(address)
            if gate.admit(peer) is None:
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self._taken(connection, peer)
            else:
                reset(connection)


def peer_of(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Host of a socket's address; an IPv4 one also where it came over an IPv6 socket."""
    host = address[0]
    return host.removeprefix("::ffff:") if host.startswith("::ffff:") and "." in host else host


def reset(connection: socket.socket) -> None:
    """Close with a reset, so that the other side notices at once."""
    reset_at_close(connection)
    connection.close()


def reset_at_close(connection: socket.socket) -> None:
    """Make a later close send a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side closed or reset a connection before it sent anything.

    The connection is non-blocking.
    """
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of ``host``, all on one port.

    Raises ``OSError`` with the address. ``::`` takes IPv4 as well, where the system has both.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, place in dict.fromkeys((family, place) for family, _, _, _, place in found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listening(family, (place[0], chosen, *place[2:]), dual=host == "::"))
    except OSError as error:
        for each in sockets:
            each.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sockets


def _listening(family: int, place: tuple[object, ...], *, dual: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        made.bind(place)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
