"""End a client's connection: answer, linger, close, reset.

The client must never take an answer that was cut for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Final

LINGER_S: Final = 2.0  # seconds that a refused client may go on sending before the cut; closing at once would reset the answer
FLUSH_S: Final = 60.0  # seconds that a closing connection waits for a client that takes nothing
RETRY_AFTER_S: Final = 1

UNSENT_BYTES: Final = 4096
"""TCP_NOTSENT_LOWAT of client sockets, in bytes.

It is how much unsent data the kernel takes before a write counts as blocked. Without it the kernel takes up to 4 MiB, a
whole answer, for a client that has stopped reading.
"""

_REASONS: Final = {
    400: "Bad Request",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def error_answer(status: int, kind: str, message: str, *, head_only: bool) -> bytes:
    """The proxy's own answer: an error object as OpenAI's API has it.

    The connection closes after it.
    """
    body = json.dumps({"error": {"message": f"handrail: {message}", "type": kind, "code": status}}).encode()
    retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if head_only else head + body


class ConnectionEnd:
    """Ends one client's connection: after its answer, by a close, or by a reset."""

    def __init__(self, transport: asyncio.Transport, connection: socket.socket) -> None:
        self._transport = transport
        self._socket = connection  # the transport's: for options only
        self._timer: asyncio.TimerHandle | None = None

    def linger(self) -> None:
        """Send no more; cut once the client has had time to read what was sent."""
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client is gone already
                self._transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def close(self) -> None:
        """Close once everything that was written is delivered."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            # Nothing more can be delivered, so the end must not look like that of a whole answer.
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.reset)

    def reset(self) -> None:
        """Send TCP RST, also under TLS, in place of a close_notify."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def over(self) -> None:
        """Note that the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()


def limit_unsent(connection: socket.socket) -> None:
    """Have writes count as blocked early (``UNSENT_BYTES``)."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
