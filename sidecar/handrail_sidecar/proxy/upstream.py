"""The upstream's side of a proxied connection.

Every read is stamped, written to the client at once, and only then parsed.
The stamp is taken before the write, so a slow client changes no figure (case B21).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from dataclasses import dataclass
from typing import Final, Protocol, cast

from handrail.records import Hint
from handrail.wal.filesystem import OUT_OF_DESCRIPTORS
from handrail_sidecar.proxy.exchange_observer import ExchangeObserver
from handrail_sidecar.proxy.relay import Relay
from handrail_sidecar.proxy.response import ResponseWatch
from handrail_sidecar.proxy.settings import ProxySettings

BUFFER_BYTES = 65536
"""Most bytes that wait in user space for a peer that takes nothing.

The one read that crossed the mark comes on top (uvloop: 256 KiB).
"""


_NO_SOCKET: Final = OUT_OF_DESCRIPTORS | {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # the last: no local port is left


class ClientConnection(Protocol):
    """The client's side as its upstream uses it: ``client.ClientSide``."""

    relay: Relay
    transport: asyncio.Transport
    flight: ExchangeObserver | None
    blocked_since: int | None
    ended: bool

    def connected(self, upstream: UpstreamSide) -> bool: ...

    def upstream_lost(self, exc: Exception | None, *, until_close: bool, opaque: bool) -> None: ...

    def content_written(self, wrote_ns: int) -> None: ...

    def response_complete(self, at_ns: int) -> None: ...

    def tunnel(self) -> None: ...

    def unsolicited(self) -> None: ...

    def regulate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectFailure:
    """Why there is no connection to the upstream, and what the client is told.

    ``status`` 503: this process or its host has no socket for it.
    """

    status: int
    kind: str
    what: str
    error_type: str


class UpstreamSide(asyncio.Protocol):
    """The connection to the observed process that belongs to one client connection."""

    def __init__(self, client: ClientConnection) -> None:
        self.transport: asyncio.Transport
        self.ended = False  # the upstream sends no more into its tunnel
        self.blocked = False  # the upstream has not taken all that was written
        self.opaque = False  # the response is not readable HTTP: bytes are passed until one side closes
        self._client = client
        self.counted = False  # counted among the process's descriptors, by the admission
        self._flight: ExchangeObserver | None = None
        self._watch: ResponseWatch | None = None
        self._reading_paused = False
        self._paused_ns = 0
        self._clock = client.relay.clock
        self._stats = client.relay.stats
        self._out = client.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=0)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):  # uvloop and asyncio set it too; here it does not depend on them
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.counted = self._client.connected(self)

    @property
    def ends_by_close(self) -> bool:
        """Whether nothing in the running response marks its end.

        Its length is unknown, or it is a tunnel, or no HTTP.
        """
        watch = self._watch
        return self.opaque or (watch.until_close if watch is not None else self._flight is not None)

    def expect(self, flight: ExchangeObserver | None, head_only: bool) -> None:
        """Expect the next response for ``flight``; None: no response is due."""
        self._flight = flight
        self._watch = None if flight is None else ResponseWatch(head_only, flight.response_head)

    def data_received(self, data: bytes) -> None:
        stamp = self._clock()
        self._out.write(data)
        self._stats.upstream_bytes += len(data)
        flight, watch = self._flight, self._watch
        if watch is not None and flight is not None:
            flight.last_read_ns = stamp
            if flight.first_delivered_ns is None:
                wrote = self._clock()
                over = watch.feed(data, stamp)
                if flight.content_seen:
                    self._client.content_written(wrote)
            else:
                over = watch.feed(data, stamp)
            if over:
                self._response_over(flight, watch, stamp)
        elif flight is None:
            self._client.unsolicited()
        if self._client.blocked_since is not None:
            self._hold_back()

    def _response_over(self, flight: ExchangeObserver, watch: ResponseWatch, stamp_ns: int) -> None:
        self._watch = None
        if watch.complete:
            self._flight = None
            self._client.response_complete(stamp_ns)
        elif watch.upgraded:
            self._client.tunnel()
        else:
            self.opaque = True
            self._stats.upstream_unreadable += 1
            flight.hint(Hint.UNDECODABLE)

    def _hold_back(self) -> None:
        if not self._reading_paused and self._out.get_write_buffer_size() > BUFFER_BYTES and not self.transport.is_closing():
            self._reading_paused = True
            self._paused_ns = self._clock()
            self._stats.reads_paused += 1
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on: the client took everything."""
        if self._reading_paused and not self.transport.is_closing():
            self._reading_paused = False
            if self._flight is not None:
                self._flight.held(self._paused_ns, self._clock())
            self.transport.resume_reading()

    def eof_received(self) -> bool | None:
        if self._client.flight is not None and self._watch is None and not self.opaque and self._flight is not None:
            self.ended = True
            if self._out.can_write_eof():
                with contextlib.suppress(OSError):
                    self._out.write_eof()
            return not self._client.ended  # a tunnel's other direction may go on
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.counted:
            self._client.relay.admission.disconnected()
        until_close = self._watch is not None and self._watch.until_close
        self._client.upstream_lost(exc, until_close=until_close, opaque=self.opaque)

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        self._client.regulate()


async def connect(upstream: UpstreamSide, settings: ProxySettings) -> ConnectFailure | None:
    """Open the connection of ``upstream``.

    ``upstream`` calls ``ClientConnection.connected`` when it is there. Returns None, or why there is none.
    """
    loop, task, expired = asyncio.get_running_loop(), asyncio.current_task(), False

    def expire() -> None:
        nonlocal expired
        assert task is not None
        expired = True
        task.cancel()

    # Not wait_for: before Python 3.12 it makes a second task, on the way of every first request.
    timer = loop.call_later(settings.connect_timeout_s, expire)
    try:
        await loop.create_connection(lambda: upstream, settings.upstream_host, settings.upstream_port)
    except asyncio.CancelledError:
        if not expired:
            raise
        what = f"did not accept the connection within {settings.connect_timeout_s:g} s"
        return ConnectFailure(504, "gateway_timeout", what, "connect_timeout")
    except ConnectionRefusedError:
        return ConnectFailure(502, "bad_gateway", "refused the connection", "connection_refused")
    except (OSError, ValueError) as error:  # ValueError: a host name that cannot be looked up
        if isinstance(error, OSError) and _numbers(error) & _NO_SOCKET:
            return ConnectFailure(503, "overloaded", "has no socket", "descriptors")
        return ConnectFailure(502, "bad_gateway", f"cannot be reached ({type(error).__name__})", "unreachable")
    finally:
        timer.cancel()
    return None


def _numbers(error: OSError) -> set[int]:
    """Error numbers of ``error``, or of all attempts to connect.

    asyncio joins the texts of the attempts when a host name has several addresses.
    """
    if error.errno is not None:
        return {error.errno}
    return {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))}
