"""Accepts connections one by one, and stops for a while where the process or the system has no room for more.

An event loop's own server cannot stop: at EMFILE uvloop (libuv) accepts and closes whoever waits, and asyncio logs a traceback.
Here they wait in the kernel's backlog until there is room again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

log = logging.getLogger(__name__)

AT_ONCE: Final = 64  # accepted before other work gets its turn
RETRY_S: Final = 0.1
HANDSHAKE_S: Final = 10.0

EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The process or the system has no descriptor or memory left."""


class Room(Protocol):
    """Says whether there is room for one more connection, and counts those that were accepted.

    ``failed``: a connection ended in its handshake; its protocol, where it was made, may or may not have got a transport.
    """

    def room(self) -> bool: ...

    def accepted(self) -> None: ...

    def failed(self, protocol: asyncio.Protocol | None) -> None: ...


@dataclass(slots=True)
class AcceptStats:
    """Counters since start."""

    pauses: int = 0  # times nothing was accepted for want of room
    errors: int = 0  # of accept itself, other than a peer that had left again
    handshakes_failed: int = 0


class Acceptor:
    """Listens on ``host`` and ``port`` and makes a protocol of each connection; ``tls`` None: plaintext.

    ``make`` gets the accepted socket, which belongs to the transport that the protocol gets afterwards.
    """

    def __init__(
        self,
        make: Callable[[socket.socket], asyncio.Protocol],
        room: Room,
        *,
        tls: ssl.SSLContext | None = None,
        handshake_s: float = HANDSHAKE_S,
        backlog: int = 1024,
    ) -> None:
        self.stats = AcceptStats()
        self.paused = False
        self._make = make
        self._room = room
        self._tls = tls
        self._handshake_s = handshake_s if tls is not None else None
        self._backlog = backlog
        self._sockets: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._failing = False  # accept failed for want of descriptors, and has not succeeded since

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Bind and listen; the first address. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self._sockets.append(_listening(family, address, self._backlog))
        except OSError:
            self._close_sockets()
            raise
        self._listen()
        bound: tuple[str, int] = self._sockets[0].getsockname()[:2]
        return bound

    def resume(self) -> None:
        """There may be room again."""
        if self.paused and self._room.room():
            self._listen()

    def close(self) -> None:
        """Stop listening; handshakes that are under way end too."""
        self._stop_reading()
        self._close_sockets()
        for task in tuple(self._opening):
            task.cancel()

    def _listen(self) -> None:
        self.paused = False
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.add_reader(each, self._accept, each)

    def _stop_reading(self) -> None:
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _pause(self) -> None:
        self._stop_reading()
        if not self.paused:
            self.paused = True
            self.stats.pauses += 1
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._again)

    def _again(self) -> None:
        self._retry = None
        if self._room.room():
            self._listen()
        else:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._again)

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            if not self._room.room():
                self._pause()
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return  # nobody waits, or who waited has left
            except OSError as error:
                self._failed(error)
                return
            self._failing = False
            self._open(accepted)

    def _failed(self, error: OSError) -> None:
        """Whoever waits goes on waiting: nothing that accept(2) may fail with is a reason to stop listening."""
        self.stats.errors += 1
        if not self._failing:
            self._failing = True
            log.warning("connections wait: accept failed with %s; it is tried again every %g s", _named(error), RETRY_S)
        self._pause()

    def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # the peer may have left again
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._room.accepted()
        task = asyncio.get_running_loop().create_task(self._serve(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        made: list[asyncio.Protocol] = []

        def protocol() -> asyncio.Protocol:
            made.append(self._make(accepted))
            return made[0]

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, asyncio.TimeoutError):  # ssl.SSLError is an OSError; a port scan is no news
            self.stats.handshakes_failed += 1
            self._gone(accepted, made)
        except asyncio.CancelledError:
            self._gone(accepted, made)
            raise

    def _gone(self, accepted: socket.socket, made: list[asyncio.Protocol]) -> None:
        if not made:
            accepted.close()
        self._room.failed(made[0] if made else None)
        self.resume()


def _listening(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(backlog)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from None
    return made


def _named(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
