"""Serve an aiohttp application on one address, behind a gate.

The gate adds bounds of connections and time limits that aiohttp lacks. A connection has to finish its TLS handshake and the head
of its first request in time, and then has an idle limit. Data that is not HTTP is counted and answered. It is not logged, since
any client may send it, as often as it likes and with any content.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from handrail.runtime.accepting import Acceptor, hung_up, reset
from handrail.runtime.connections import Expiry, Gate

log = logging.getLogger(__name__)

_MALFORMED: Final = (HttpProcessingError, web.RequestPayloadError)
_GRACE_S: Final = 60.0  # aiohttp's own idle limit comes after ours


class HttpServer:
    """HTTP server of ``app``.

    ``tls`` None: plaintext. ``options``: aiohttp's, of its ``AppRunner``. ``shutdown`` works without ``start`` and twice.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        gate: Gate,
        *,
        tls: ssl.SSLContext | None = None,
        logger: logging.Logger = log,
        **options: Any,
    ) -> None:
        self.address = (host, port)
        self._gate = gate
        self._tls = tls
        app.middlewares.insert(0, _noted)
        idle_s = gate.bounds.idle_s + _GRACE_S
        self._runner = web.AppRunner(app, access_log=None, logger=_quiet(logger, gate), keepalive_timeout=idle_s, **options)
        self._acceptor = Acceptor(gate, self._take)
        self._greetings: set[asyncio.Task[None]] = set()
        self._arrivals: set[_Arrival] = set()

    async def start(self) -> None:
        """Start. Raises ``OSError`` when the port cannot be bound."""
        await self._runner.setup()
        self.address = self._acceptor.start(*self.address)

    def stop_accepting(self) -> None:
        """Stop accepting; existing connections go on."""
        self._acceptor.close()

    async def shutdown(self) -> None:
        """Stop listening, let running requests end, close."""
        self.stop_accepting()
        for arrival in list(self._arrivals):
            arrival.close()
        for each in self._greetings:
            each.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        await self._runner.cleanup()

    def _take(self, connection: socket.socket, peer: str) -> None:
        if self._tls is None:
            self._begin(connection, peer)
        else:
            self._arrivals.add(_Arrival(connection, peer, self._gate, self._arrived))

    def _arrived(self, arrival: _Arrival, connection: socket.socket | None) -> None:
        """Begin an arrival's handshake at its turn; None: it is closed instead."""
        self._arrivals.discard(arrival)
        if connection is None:
            self._gate.leave(arrival.peer)
        else:
            self._begin(connection, arrival.peer)

    def _begin(self, connection: socket.socket, peer: str) -> None:
        greeting = asyncio.get_running_loop().create_task(self._greet(connection, peer))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket, peer: str) -> None:
        """Hand a connection over to aiohttp, after the TLS handshake where there is one."""
        served = self._runner.server
        if served is None:  # shutting down
            reset(connection)
            self._gate.leave(peer)
            return
        watched = _Watched(served(), self._gate, peer)
        limit_s = None if self._tls is None else self._gate.bounds.handshake_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: watched, connection, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except ConnectionAbortedError:  # what asyncio and uvloop raise for a handshake that takes too long
            self._gate.expired[Expiry.HANDSHAKE] += 1
        except OSError as error:  # no TLS was spoken, or the peer is gone
            log.debug("%s: %s: %s", self._gate.name, peer, error)
        finally:
            if not watched.connected:
                self._gate.leave(peer)


class _Arrival:
    """Connection before its TLS handshake.

    It waits for the sender's first bytes, then for its turn. A silent sender costs neither a transport nor a task.
    ``ended`` gets the socket at its turn, or None once it is closed.
    """

    __slots__ = ("_connection", "_ended", "_gate", "_loop", "_timer", "peer")

    def __init__(
        self, connection: socket.socket, peer: str, gate: Gate, ended: Callable[[_Arrival, socket.socket | None], None]
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._gate = gate
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(gate.bounds.handshake_s, self._expire)
        self._loop.add_reader(connection.fileno(), self._readable)

    def close(self) -> None:
        """Close; works twice."""
        if self._connection.fileno() < 0:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._connection.fileno())
        reset(self._connection)
        self._ended(self, None)

    def _readable(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._gate.handshakes.enter(self.peer, self._turn)

    def _turn(self) -> bool:
        if self._connection.fileno() < 0:
            return False
        if hung_up(self._connection):
            self.close()
            return False
        self._timer.cancel()
        self._ended(self, self._connection)
        return True

    def _expire(self) -> None:
        self._gate.expired[Expiry.HANDSHAKE] += 1
        self.close()


class _Watched(asyncio.Protocol):
    """Layer between transport and aiohttp's protocol that enforces the time limits."""

    __slots__ = ("_busy", "_gate", "_head", "_inner", "_loop", "_peer", "_timer", "_transport", "connected")

    def __init__(self, inner: asyncio.Protocol, gate: Gate, peer: str) -> None:
        self.connected = False
        self._inner = inner
        self._gate = gate
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._busy = 0  # requests being answered
        self._head = False  # whether the timer is a head's
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = True
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own over TLS is no subclass
        self._inner.connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._busy and not self._head:
            self._expect_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._gate.leave(self._peer)
        self._inner.connection_lost(exc)

    def begun(self) -> None:
        """Note that a request's head is complete."""
        self._busy += 1
        self._stop_timer()

    def answered(self) -> None:
        """Note that its answer is made; the time to send it counts as idle."""
        self._busy -= 1
        if not self._busy and self._transport is not None and not self._transport.is_closing():
            self._set_timer(self._gate.bounds.idle_s, Expiry.IDLE)

    def _expect_head(self) -> None:
        self._set_timer(self._gate.bounds.head_s, Expiry.HEAD)
        self._head = True

    def _set_timer(self, seconds: float, expiry: Expiry) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._expire, expiry)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._head = None, False

    def _expire(self, expiry: Expiry) -> None:
        self._timer = None
        self._gate.expired[expiry] += 1
        if self._transport is not None:
            self._transport.abort()


@web.middleware
async def _noted(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Middleware that notes complete heads and answers on the connection."""
    transport = request.transport
    watched = transport.get_protocol() if transport is not None else None
    if not isinstance(watched, _Watched):
        return await handler(request)
    watched.begun()
    try:
        return await handler(request)
    finally:
        watched.answered()


def _quiet(logger: logging.Logger, gate: Gate) -> logging.Logger:
    """Logger for aiohttp that passes records on to ``logger``.

    Malformed requests are counted instead.
    """
    own = logging.Logger(logger.name, logging.DEBUG)  # not from the registry: one for each listener; TLS comes at debug level
    own.parent = logger
    own.addFilter(_NotHttp(logger, gate))
    return own


class _NotHttp(logging.Filter):
    """Filter for malformed requests.

    aiohttp would write a traceback for each, with the sent bytes.
    """

    def __init__(self, logger: logging.Logger, gate: Gate) -> None:
        super().__init__()
        self._logger = logger
        self._gate = gate

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _MALFORMED):
            self._gate.malformed += 1
            return False
        return self._logger.isEnabledFor(record.levelno)
