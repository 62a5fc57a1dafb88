"""Accept gRPC's connections, bound them per peer, and pass their bytes to gRPC.

gRPC's own server owns its sockets and has no bound for each peer. gRPC listens on a private Unix socket. The front connects to it
when a sender has sent its first bytes, so that a silent sender costs one descriptor; over TLS, also not before the turn of the
sender's handshake. TLS, HTTP/2 and all that follows are between sender and gRPC.
In the abstract namespace of Linux the connection is named after the sender, so gRPC knows its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from handrail.runtime.accepting import Acceptor, reset_at_close
from handrail.runtime.connections import Expiry, Gate, Refusal
from handrail.wal.filesystem import OUT_OF_DESCRIPTORS

log = logging.getLogger(__name__)

DESCRIPTORS: Final = 3
"""Descriptors of one connection: the sender's, and both ends of the one to gRPC."""

_NAMED: Final = sys.platform == "linux"
_PREFIX: Final = "handrail-from"
_BUFFER: Final = memoryview(bytearray(256 << 10))  # shared by one loop: bytes are sent, or copied, before the next read
_BUSY_S: Final = 0.01  # until gRPC has accepted the waiting connections
_LAST_WORDS_S: Final = 1.0  # for the bytes sent before the end
_GRACE_S: Final = 30.0  # gRPC's own idle limit comes before ours: it closes with GOAWAY first


class GrpcFront:
    """Listener for gRPC's senders.

    ``target``: the address on which gRPC listens. ``tls``: whether a connection begins with a handshake, which waits for its
    turn in ``gate.handshakes``. ``close`` works without ``start`` and twice.
    """

    def __init__(self, gate: Gate, *, tls: bool = False) -> None:
        self.gate = gate
        self.tls = tls
        self.acceptor = Acceptor(gate, self._take)
        self._name = f"handrail-{secrets.token_hex(16)}"
        self._from = f"{_PREFIX}/{secrets.token_hex(8)}"
        self._folder = None if _NAMED else tempfile.TemporaryDirectory(prefix="handrail-")
        self._numbers = itertools.count()
        self._passing: set[_Passage] = set()
        self._moved = asyncio.Event()  # set when a connection has ended

    @property
    def target(self) -> str:
        """Address in gRPC's form."""
        return f"unix-abstract:{self._name}" if self._folder is None else f"unix:{self._path}"

    @property
    def _path(self) -> str:
        return f"\0{self._name}" if self._folder is None else str(Path(self._folder.name) / "grpc")

    def connect(self, peer: str) -> socket.socket:
        """Connect to gRPC on behalf of ``peer``.

        Raises ``BlockingIOError`` while gRPC has not accepted the waiting connections.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            if _NAMED:
                made.bind(f"\0{self._from}/{next(self._numbers)}/{peer}")
            made.connect(self._path)
        except OSError:
            made.close()
            raise
        return made

    async def settled(self) -> None:
        """Return when no connection is left, or shortly after.

        The short wait is for gRPC's last bytes, which may still be on their way.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_ended(), _LAST_WORDS_S)

    async def _all_ended(self) -> None:
        while any(each.connected for each in self._passing):
            self._moved.clear()
            await self._moved.wait()

    def close(self) -> None:
        """Stop listening and cut the remaining connections."""
        self.acceptor.close()
        for each in list(self._passing):
            each.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _take(self, sender: socket.socket, peer: str) -> None:
        with contextlib.suppress(OSError):
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._passing.add(_Passage(self, sender, peer))

    def moved(self) -> None:
        """Note that one connection has ended."""
        self._moved.set()

    def left(self, passage: _Passage, peer: str) -> None:
        """Note that one connection is closed."""
        self.moved()
        self._passing.discard(passage)
        self.gate.leave(peer)


def sender_of(peer: str) -> str:
    """Sender's address in gRPC's form, of a connection through a front; '' otherwise."""
    words = unquote(peer).removeprefix("unix-abstract:").split("/", 3)
    return words[3] if len(words) == 4 and words[0] == _PREFIX else ""


class _Passage:
    """One sender's connection, and the one to gRPC from the first bytes on."""

    __slots__ = ("_back", "_ended", "_forth", "_front", "_grpc", "_loop", "_peer", "_received_at", "_sender", "_timer")

    def __init__(self, front: GrpcFront, sender: socket.socket, peer: str) -> None:
        self._front = front
        self._sender = sender
        self._peer = peer
        self._grpc: socket.socket | None = None
        self._forth: _Pump | None = None
        self._back: _Pump | None = None
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._received_at = self._loop.time()
        self._timer = self._loop.call_later(front.gate.bounds.head_s, self._expire, Expiry.HEAD)
        self._loop.add_reader(sender.fileno(), self._readable)

    @property
    def connected(self) -> bool:
        """Whether the connection to gRPC is open and neither side has ended."""
        return self._grpc is not None and not self._ended

    def close(self) -> None:
        """Close both ends at once; works twice."""
        if self._sender.fileno() < 0:
            return
        self._timer.cancel()
        for pump in (self._forth, self._back):
            if pump is not None:
                pump.stop()
        self._loop.remove_reader(self._sender.fileno())
        self._sender.close()
        if self._grpc is not None:
            self._grpc.close()
        self._front.left(self, self._peer)

    def _readable(self) -> None:
        """Handle bytes from the sender, or its hang-up."""
        self._loop.remove_reader(self._sender.fileno())
        if self._front.tls:
            self._front.gate.handshakes.enter(self._peer, self._first)
        else:
            self._first()

    def _first(self) -> bool:
        """Pass on the first bytes; False if the connection has ended."""
        if self._sender.fileno() < 0:
            return False
        try:
            size = self._sender.recv_into(_BUFFER)
        except (BlockingIOError, InterruptedError):  # spurious wake-up
            self._loop.add_reader(self._sender.fileno(), self._readable)
            return False
        except OSError:
            size = 0
        if size:
            self._connect(bytes(_BUFFER[:size]))
        else:
            self.close()
        return bool(size)

    def _connect(self, first: bytes) -> None:
        try:
            self._grpc = self._front.connect(self._peer)
        except BlockingIOError:
            self._timer.cancel()
            self._timer = self._loop.call_later(_BUSY_S, self._connect, first)
            return
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                self._front.gate.refuse(Refusal.DESCRIPTORS, error.strerror or str(error))
            else:
                log.debug("gRPC did not accept a connection: %s", error)
            reset_at_close(self._sender)
            self.close()
            return
        self._timer.cancel()
        self._timer = self._loop.call_later(self._patience_s, self._look)
        self._forth = _Pump(self, self._sender, self._grpc)
        self._back = _Pump(self, self._grpc, self._sender)
        self._back.read()
        self._forth.read()
        self._forth.send(memoryview(first))

    @property
    def _patience_s(self) -> float:
        return self._front.gate.bounds.idle_s + _GRACE_S

    def received(self, pump: _Pump) -> None:
        """Note that bytes came."""
        if pump is self._forth:
            self._received_at = self._loop.time()

    def ended(self, target: socket.socket) -> None:
        """Handle the end of one side's data.

        Pass the end on to the other side, and give bytes on their way a moment.
        """
        if self._ended:
            self.close()
            return
        self._ended = True
        self._front.moved()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        self._timer.cancel()
        self._timer = self._loop.call_later(_LAST_WORDS_S, self.close)

    def _look(self) -> None:
        """Check whether the sender has been silent for too long.

        A half-open connection is silent.
        """
        left_s = self._received_at + self._patience_s - self._loop.time()
        if left_s <= 0:
            self._expire(Expiry.IDLE)
        else:
            self._timer = self._loop.call_later(left_s, self._look)

    def _expire(self, expiry: Expiry) -> None:
        self._front.gate.expired[expiry] += 1
        reset_at_close(self._sender)
        self.close()


class _Pump:
    """Move bytes one way, reading and sending in one step.

    Bytes that the other side does not take stop the reading.
    asyncio's transports are not used: they copy each piece once more and send it one turn of the loop later.
    """

    __slots__ = ("_loop", "_passage", "_reading", "_rest", "_source", "_target")

    def __init__(self, passage: _Passage, source: socket.socket, target: socket.socket) -> None:
        self._passage = passage
        self._source = source
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._reading = False

    def read(self) -> None:
        """Begin to wait for bytes."""
        self._reading = True
        self._loop.add_reader(self._source.fileno(), self._readable)

    def stop(self) -> None:
        """Stop waiting for bytes."""
        if self._reading:
            self._loop.remove_reader(self._source.fileno())
            self._reading = False
        if self._rest:
            self._loop.remove_writer(self._target.fileno())
            self._rest = b""

    def send(self, piece: memoryview) -> None:
        """Send all of it, now or as soon as the other side takes it."""
        try:
            sent = self._target.send(piece)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._passage.close()
            return
        if sent < len(piece):
            self.stop()
            self._rest = bytes(piece[sent:])
            self._loop.add_writer(self._target.fileno(), self._writable)

    def _readable(self) -> None:
        try:
            size = self._source.recv_into(_BUFFER)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._passage.close()
            return
        if size:
            self._passage.received(self)
            self.send(_BUFFER[:size])
        else:
            self.stop()
            self._passage.ended(self._target)

    def _writable(self) -> None:
        try:
            sent = self._target.send(self._rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._passage.close()
            return
        self._rest = self._rest[sent:]
        if not self._rest:
            self._loop.remove_writer(self._target.fileno())
            self.read()
