"""The client's side of a proxied connection: read requests and relay them.

It sends requests on as they come in and decides how an exchange ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from enum import Enum
from typing import cast

from handrail_sidecar.proxy.connection_end import ConnectionEnd, error_answer, limit_unsent
from handrail_sidecar.proxy.exchange_observer import EndReason, ExchangeObserver
from handrail_sidecar.proxy.head import HeadReader, HeadTooLongError, MalformedHeadError, RequestHead
from handrail_sidecar.proxy.relay import Relay
from handrail_sidecar.proxy.request_framing import BadChunkError, ChunkedBody, LengthBody
from handrail_sidecar.proxy.upstream import BUFFER_BYTES, UpstreamSide, connect


class _Phase(Enum):
    """State of a client connection with regard to its current request."""

    HEAD = "head"  # idle, or the head is incomplete
    CONNECT = "connect"  # first request, upstream not connected yet
    BODY = "body"  # the rest of the request's body is due
    ANSWER = "answer"  # request sent whole, response outstanding
    TUNNEL = "tunnel"  # after 101: bytes both ways
    LINGER = "linger"  # answered by the proxy; what still comes is discarded
    CLOSED = "closed"


REFUSED_HEAD_S = 2.0  # seconds that a client without a stream has for the head of the request that is refused

_WAITING = (_Phase.CONNECT, _Phase.ANSWER)


class ClientSide(asyncio.Protocol):
    """The connection of one client, and everything about its exchanges.

    It reads requests and sends them on.
    """

    def __init__(self, relay: Relay, accepted: socket.socket) -> None:
        self.relay = relay
        self.opened = False
        self.unused_ns: int | None = None  # kept alive after an answer and not used since
        self._socket = accepted  # the transport's: for options only
        self._admitted = False  # a stream: an upstream connection fits
        self._owed = False  # and is not opened yet
        self._served = False  # an exchange is over
        self._last = False  # the client sends no request after the current one
        self._waiting_ns = 0  # since when the client owes a request
        self._read_ns = 0  # when the client's last bytes came
        self.flight: ExchangeObserver | None = None
        self.response_done = False  # the response was read to its end, though perhaps not delivered
        self.blocked_since: int | None = None  # since when the client has not taken all that was written
        self.ended = False  # the client sends no more into its tunnel
        self.transport: asyncio.Transport
        self.upstream: UpstreamSide | None = None
        self._phase = _Phase.HEAD
        self._pending = bytearray()  # an incomplete head, or bytes that were sent too early; at most BUFFER_BYTES and one read
        self._pending_ns = 0
        self._pending_unix_ns = 0
        self._heads = HeadReader(relay.settings.max_head_bytes)
        self._prefix = b""  # a head that waits for the first piece of its body, to go out in one write
        self._body: LengthBody | ChunkedBody = LengthBody(0)
        self._head_only = False
        self._reading_paused = False
        self._delivery_awaited = False
        self._response_end_ns = 0
        self._connecting: asyncio.Task[None] | None = None
        self._end: ConnectionEnd

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        # High water 0: asyncio reports every byte that the kernel did not take; write_blocked_ns is made of that. Over TLS the
        # mark itself counts as above it, so 0 would report an empty buffer.
        transport.set_write_buffer_limits(high=0 if self.relay.settings.tls is None else 1)
        self._end = ConnectionEnd(transport, self._socket)
        self.opened = True
        self._waiting_ns = self.relay.clock()
        self._admitted = self._owed = self.relay.stream()
        self.relay.stats.connections += 1
        self.relay.stats.open_connections += 1
        self.relay.connections.add(self)
        self.relay.empty.clear()
        if self.relay.draining:
            self._close()

    def data_received(self, data: bytes) -> None:
        self.relay.stats.client_bytes += len(data)
        self._read_ns = self.relay.clock()
        phase, body = self._phase, self._body
        if phase is _Phase.BODY and isinstance(body, LengthBody) and len(data) <= body.left and not self._pending:
            self._pass_body(body.feed(data)[0])
        elif phase is _Phase.TUNNEL:
            assert self.upstream is not None
            self.upstream.transport.write(data)
        elif phase in (_Phase.LINGER, _Phase.CLOSED):
            return
        elif self.upstream is not None and self.upstream.opaque:
            # The end of the running response is unknown, so the start of the next answer would be unknown too.
            self._cut()
            return
        else:
            self._queue(data)
            self._advance()
        self.regulate()

    def eof_received(self) -> bool | None:
        if self._phase is _Phase.TUNNEL and self.upstream is not None:
            self.ended = True
            if self.upstream.ended:
                self.upstream.transport.close()  # both directions are over; its end ends this side too
            elif self.upstream.transport.can_write_eof():
                with contextlib.suppress(OSError):
                    self.upstream.transport.write_eof()
            return self.transport.can_write_eof()  # TLS has no half-closed connections
        # A half-close counts as a whole one, as in the servers behind (uvicorn, hyper): the proxy notices a client that left
        # while its request waits for the first byte (case E15).
        if self.flight is not None and not self.response_done:
            self.transport.abort()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        now = self.relay.clock()
        self._phase = _Phase.CLOSED
        self.unused_ns = None
        self._settle_blocked(now)
        if self.flight is not None:
            delivered = self.response_done and exc is None and not self._delivery_awaited
            self.relay.finish(
                self.flight, EndReason.CLEAN if delivered else EndReason.CLIENT_GONE, self._response_end_ns if delivered else now
            )
            self.flight = None
        if self._connecting is not None:
            self._connecting.cancel()
        self._end.over()
        if self.upstream is not None:
            self.upstream.transport.abort()
        self.relay.stats.open_connections -= 1
        self.relay.connections.discard(self)
        self.relay.admission.closed(stream=self._admitted, owed=self._owed)
        self._admitted = self._owed = False
        self.relay.freed()
        if not self.relay.connections:
            self.relay.empty.set()

    def pause_writing(self) -> None:
        if self.blocked_since is None:
            self.blocked_since = self.relay.clock()

    def resume_writing(self) -> None:
        now = self.relay.clock()
        self._settle_blocked(now)
        if self._delivery_awaited and self.flight is not None:
            self._delivery_awaited = False
            self.flight.first_delivered_ns = now
        if self.upstream is not None:
            self.upstream.resume()
        if self.response_done and self.flight is not None:
            self._delivered()

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _queue(self, data: bytes) -> None:
        if not self._pending or (self._phase is _Phase.HEAD and self._pending == b"\r"):  # an empty line does not start a request
            self._pending_ns = self._read_ns
            self._pending_unix_ns = self.relay.wall()
        self._pending += data
        self.unused_ns = None

    def _advance(self) -> None:
        """Process as much of the received bytes as the state of the exchange allows."""
        while self._pending:
            if self._phase is _Phase.HEAD:
                if not self._take_head():
                    return
            elif self._phase is _Phase.BODY:
                self._take_body()
            else:
                return

    def _take_head(self) -> bool:
        try:
            head = self._heads.take(self._pending)
        except HeadTooLongError:
            limit = self.relay.settings.max_head_bytes
            self._refuse_protocol(431, "head_too_long", f"the request's head is longer than {limit} bytes")
            return False
        except MalformedHeadError as error:
            self._refuse_protocol(400, "bad_request", str(error))
            return False
        if head is None:
            if self._served and (
                not self._pending or self._pending.startswith(b"\r")
            ):  # an empty line does not use the connection
                self.unused_ns = self._waiting_ns
            return False
        if head.method == b"CONNECT":
            self._refuse_protocol(405, "method_not_allowed", "CONNECT is not supported")
            return False
        return self._begin(head)

    def _begin(self, head: RequestHead) -> bool:
        self.flight = self.relay.begin(head, self._pending_ns, self._pending_unix_ns)
        self.response_done = False
        self._delivery_awaited = False
        self._body = ChunkedBody() if head.chunked else LengthBody(head.content_length or 0)
        self._head_only = head.method == b"HEAD"
        self._last = head.last
        if not self._admitted:
            self._admitted = self._owed = self.relay.stream()
        if not self._admitted:
            self._refuse_stream("streams")
            return False
        if self._too_large():
            return False
        if self.upstream is None:
            self._phase = _Phase.CONNECT
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect())
        else:
            self._send_head()
        return True

    def _send_head(self) -> None:
        assert self.flight is not None
        assert self.upstream is not None
        self.upstream.expect(self.flight, self._head_only)
        self.flight.forwarded_ns = self.relay.clock()
        if self._body.done:
            self.upstream.transport.write(self.flight.head_out)
            self._request_done()
            return
        self._phase = _Phase.BODY
        if self._pending:
            self._prefix = self.flight.head_out
        else:
            self.upstream.transport.write(self.flight.head_out)

    def _take_body(self) -> None:
        try:
            pieces, taken = self._body.feed(bytes(self._pending))
        except BadChunkError as error:
            self.relay.stats.protocol_errors += 1
            self._give_up(400, "bad_request", str(error), EndReason.CLIENT_GONE)
            return
        del self._pending[:taken]
        if not self._too_large():
            self._pass_body(pieces)

    def _pass_body(self, pieces: list[bytes]) -> None:
        assert self.flight is not None
        self._send(self._body.framed(pieces))
        for piece in pieces:
            self.flight.request_body(piece)
        if self._body.done:
            self._request_done()

    def _send(self, data: bytes) -> None:
        assert self.upstream is not None
        if self._prefix:
            data, self._prefix = self._prefix + data, b""
        if data:
            self.upstream.transport.write(data)

    def _too_large(self) -> bool:
        limit = self.relay.settings.max_body_bytes
        if limit is None or self._body.size <= limit:
            return False
        self.relay.stats.refused_bodies += 1
        self._give_up(413, "content_too_large", f"the request's body is longer than {limit} bytes", EndReason.REFUSED)
        return True

    def _request_done(self) -> None:
        assert self.flight is not None
        self.flight.request_done_ns = self.relay.clock()
        self._phase = _Phase.ANSWER
        if self.response_done and self.blocked_since is None:  # the answer came before the request's end
            self._exchange_over()

    def regulate(self) -> None:
        """Stop or resume reading the client.

        Reading stops while the upstream takes nothing, or while too much was sent ahead.
        The proxy does not see a client leave while it does not read it, so it reads small amounts ahead instead.
        """
        upstream = self.upstream
        pause = (self._phase in _WAITING and len(self._pending) > BUFFER_BYTES) or (
            upstream is not None and upstream.blocked and upstream.transport.get_write_buffer_size() > BUFFER_BYTES
        )
        if pause is not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # --- upstream ---------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        settings, admission, upstream = self.relay.settings, self.relay.admission, UpstreamSide(self)
        admission.opening()  # its socket is among the descriptors from here on, not only once the connection is there
        self._owed = False
        try:
            failure = await connect(upstream, settings)
        finally:
            if not upstream.counted:
                admission.disconnected()
            self._connecting = None
        if failure is None:
            return
        if failure.status == 503:
            self._refuse_stream(failure.error_type)
            return
        self.relay.stats.connect_failures += 1
        if self.flight is not None:
            self.flight.error_type = failure.error_type
        self._give_up(failure.status, failure.kind, f"upstream {settings.upstream} {failure.what}", EndReason.UNREACHABLE)

    def connected(self, upstream: UpstreamSide) -> bool:
        """Note that the upstream connection is open; False when it is no longer needed.

        The upstream side calls it before anything else.
        """
        if self._phase is not _Phase.CONNECT:
            upstream.transport.abort()  # the client left meanwhile
            return False
        self.upstream = upstream
        self.relay.stats.upstream_connections += 1
        self._send_head()
        self._advance()
        self.regulate()
        limit_unsent(self._socket)  # before the first answer, but after the first request went out
        return True

    def upstream_lost(self, exc: Exception | None, *, until_close: bool, opaque: bool) -> None:
        """Note that the upstream connection is gone.

        The client's connection ends with it, as it would without the proxy.
        """
        self.upstream = None
        flight, now = self.flight, self.relay.clock()
        if self._phase in (_Phase.LINGER, _Phase.CLOSED):
            return
        if flight is None:
            self._close()
        elif self.response_done:
            if self._phase is _Phase.BODY:
                self._linger()  # it answered early and hung up; the client still sends and must be able to read the answer
            else:
                self._close()
        elif self._phase is _Phase.TUNNEL:
            self.relay.finish(flight, EndReason.CLEAN, now)
            self._end_as_upstream(exc)
        elif opaque:
            self.relay.finish(flight, EndReason.UNREADABLE, now)
            self._end_as_upstream(exc)
        elif until_close and exc is None:
            self.response_complete(now)
            self._close()
        else:
            self.relay.finish(flight, EndReason.UPSTREAM_GONE, now)
            if until_close:
                self._reset()  # a plain close would claim that the body is whole
            else:
                self._close()

    # --- responses --------------------------------------------------------------------------------------------------------

    def content_written(self, wrote_ns: int) -> None:
        """Note that the client was sent the first content at ``wrote_ns``.

        ``wrote_ns`` is the time of the write for the read that held the first content.
        """
        assert self.flight is not None
        if self.blocked_since is None:
            self.flight.first_delivered_ns = wrote_ns
        else:
            self._delivery_awaited = True

    def response_complete(self, at_ns: int) -> None:
        """Note that the response was read to its end and written.

        Its record waits until the client took the last byte.
        """
        self.response_done = True
        self._response_end_ns = at_ns
        if self.blocked_since is None:
            self._delivered()

    def tunnel(self) -> None:
        """Pass only bytes from here on: the upstream sent 101 Switching Protocols."""
        assert self.upstream is not None
        self.relay.stats.tunnels += 1
        self._phase = _Phase.TUNNEL
        if self._pending:
            self.upstream.transport.write(bytes(self._pending))
            self._pending.clear()
        self.regulate()

    def unsolicited(self) -> None:
        """Note that the upstream sent bytes that answer no request.

        The proxy passed them on. A later answer can no longer be distinguished from them.
        """
        self._close()

    def _delivered(self) -> None:
        assert self.flight is not None
        self.relay.finish(self.flight, EndReason.CLEAN, self._response_end_ns)
        if self._phase is _Phase.ANSWER:
            self._exchange_over()

    def _exchange_over(self) -> None:
        self.flight = None
        self._phase = _Phase.HEAD
        self._served = True
        self._waiting_ns = self.relay.clock()
        if self.upstream is not None:
            self.upstream.expect(None, False)
        if self.transport.is_closing():
            return
        if not self._pending:
            self.unused_ns = self._waiting_ns
        if self._last:
            self._close_after_last()
        elif self.relay.draining:
            self._close()
        elif self._pending:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if not self.transport.is_closing():
            self._advance()
            self.regulate()

    def _settle_blocked(self, now: int) -> None:
        if self.blocked_since is not None:
            if self.flight is not None:
                self.flight.write_blocked_ns += now - max(self.blocked_since, self.flight.arrival_ns)
            self.blocked_since = None

    # --- time limits ------------------------------------------------------------------------------------------------------

    def look_at_limits(self, now: int) -> None:
        """End a connection whose client takes too long to send a request or its rest.

        It is called about once a second.
        """
        phase, settings = self._phase, self.relay.settings
        if phase is _Phase.HEAD:
            if self.unused_ns is not None:
                if now - self.unused_ns >= settings.idle_timeout_s * 1e9:
                    self.relay.stats.timeouts["idle"] += 1
                    self._close()
                return
            limit_s = settings.head_timeout_s if self._admitted else min(REFUSED_HEAD_S, settings.head_timeout_s)
            since = max(self._waiting_ns, self._pending_ns) if self._pending else self._waiting_ns
            if now - since >= limit_s * 1e9:
                self._head_timed_out(limit_s)
        elif phase is _Phase.BODY and not self._reading_paused:
            answered_ns = self.flight.last_read_ns if self.flight is not None else None
            if now - max(self._read_ns, answered_ns or 0) >= settings.idle_timeout_s * 1e9:
                self.relay.stats.timeouts["body"] += 1
                what = f"no byte of the request's body arrived for {settings.idle_timeout_s:g} s"
                self._give_up(408, "request_timeout", what, EndReason.CLIENT_GONE)

    def _head_timed_out(self, limit_s: float) -> None:
        if not self._admitted:
            self._refuse_stream("streams")
            return
        self.relay.stats.timeouts["head"] += 1
        if self._pending:
            self._answer(408, "request_timeout", f"the request's head was not complete within {limit_s:g} s")
        else:
            self._close()

    # --- endings ----------------------------------------------------------------------------------------------------------

    @property
    def idle_ns(self) -> int | None:
        """Since when the client of a stream owes a request of which nothing has come.

        None when it owes none.
        """
        if self.unused_ns is not None:
            return self.unused_ns
        silent = self._phase is _Phase.HEAD and self._admitted and not self._served and not self._pending
        return self._waiting_ns if silent else None

    def give_way(self) -> None:
        """End this connection in favour of another.

        A kept-alive connection is closed, which may happen at any time; a new one gets a 503.
        """
        if self._served:
            self._close()
            return
        self.relay.admission.withdrawn()
        self._admitted = self._owed = False
        self._refuse_stream("streams")

    def drain(self) -> None:
        """Close now when idle; otherwise close when the running exchange ends."""
        if self.flight is None:
            self._close()

    def abort(self) -> None:
        """Cut both connections now; the record says that the proxy cut the exchange."""
        if self.flight is not None:
            if not self.flight.recorded:
                self.relay.stats.aborted += 1
            self.relay.finish(self.flight, EndReason.SHUTDOWN, self.relay.clock())
        upstream = self.upstream
        if upstream is not None and self.flight is not None and not self.response_done and upstream.ends_by_close:
            self._reset()
        else:
            self._phase = _Phase.CLOSED
            self.transport.abort()
        if upstream is not None:
            upstream.transport.abort()

    def _refuse_stream(self, reason: str) -> None:
        """Answer 503: there is no room for one more stream.

        A connection that has sent no request yet gets it too.
        """
        self.relay.refused(reason)
        message = "no more streams fit" if reason == "streams" else "no connection to the upstream can be opened now"
        if self.flight is None:
            self._answer(503, "overloaded", message)
            return
        self.flight.error_type = reason
        self._give_up(503, "overloaded", message, EndReason.REFUSED)

    def _refuse_protocol(self, status: int, kind: str, message: str) -> None:
        self.relay.stats.protocol_errors += 1
        self._answer(status, kind, message)

    def _give_up(self, status: int, kind: str, message: str, ending: EndReason) -> None:
        """End the running exchange from the proxy.

        The client gets an answer if the upstream has not begun one; otherwise the connection is closed.
        """
        flight = self.flight
        untouched = flight is not None and flight.last_read_ns is None
        if flight is not None:
            flight.status = status if untouched else flight.status
            if untouched:
                self._answer(status, kind, message)
            self.relay.finish(flight, ending, self.relay.clock())
            self.flight = None
        if not untouched:
            self._cut()
        elif self.upstream is not None:
            self.upstream.transport.abort()

    def _answer(self, status: int, kind: str, message: str) -> None:
        head_only = self._head_only and self.flight is not None
        self.transport.write(error_answer(status, kind, message, head_only=head_only))
        self._linger()

    def _linger(self) -> None:
        self._phase = _Phase.LINGER
        self._pending.clear()
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        self._end.linger()

    def _close(self) -> None:
        if self._phase is _Phase.CLOSED or self.transport.is_closing():
            return
        self._phase = _Phase.CLOSED
        self.unused_ns = None
        if self.upstream is not None:
            self.upstream.transport.abort()
        self._end.close()

    def _close_after_last(self) -> None:
        """Close after the last request: the client asked for the end of the connection.

        What the client sent behind that request is not read as a request.
        """
        if self.upstream is not None:
            self.upstream.transport.abort()
        if self._pending:
            self._linger()  # closing with unread bytes would reset the answer
        else:
            self._close()

    def _end_as_upstream(self, exc: Exception | None) -> None:
        """End the client's connection as the upstream ended: a reset stays a reset.

        Only the end of the connection tells how this response ended.
        """
        if exc is None:
            self._close()
        else:
            self._reset()

    def _cut(self) -> None:
        """Cut the connection in the middle of an answer.

        The client must not take the answer for a whole one.
        """
        if self.upstream is not None and self.upstream.ends_by_close and not self.response_done:
            self.upstream.transport.abort()
            self._reset()
        else:
            self._close()

    def _reset(self) -> None:
        self._phase = _Phase.CLOSED
        self._end.reset()
