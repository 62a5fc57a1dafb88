"""Stands before gRPC's server, which owns its sockets and knows no bound for each peer: accepts, counts, and passes bytes on.

gRPC listens on a private Unix socket. It is connected to when a sender has said something, so that who says nothing costs one
descriptor; over TLS also not before it is the turn of the sender's handshake. TLS, HTTP/2 and all that follows are between sender
and gRPC. In the abstract namespace of Linux the connection is named after the sender, so gRPC knows who it is.
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
"""That one connection takes: the sender's, and both ends of the one to gRPC."""

_NAMED: Final = sys.platform == "linux"
_PREFIX: Final = "handrail-from"
_BUFFER: Final = memoryview(bytearray(256 << 10))  # of one loop: what is read is sent, or copied, before the next read
_BUSY_S: Final = 0.01  # until gRPC has accepted what waits
_LAST_WORDS_S: Final = 1.0  # for what was sent before the end
_GRACE_S: Final = 30.0  # gRPC's own limit of idleness comes before ours: it says goodbye first


class GrpcFront:
    """Listens for gRPC's senders. ``target``: what gRPC has to listen on. ``close`` works without ``start`` and twice.

    ``tls``: whether a connection begins with a handshake, which waits for its turn in ``gate.handshakes``.
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
        self._moved = asyncio.Event()  # one has ended

    @property
    def target(self) -> str:
        """In gRPC's words."""
        return f"unix-abstract:{self._name}" if self._folder is None else f"unix:{self._path}"

    @property
    def _path(self) -> str:
        return f"\0{self._name}" if self._folder is None else str(Path(self._folder.name) / "grpc")

    def connect(self, peer: str) -> socket.socket:
        """A connection to gRPC on behalf of ``peer``. Raises ``BlockingIOError`` while it has not accepted what waits."""
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
        """Return when no connection is left, at the latest in a moment: gRPC's last words may be on their way."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_ended(), _LAST_WORDS_S)

    async def _all_ended(self) -> None:
        while any(each.connected for each in self._passing):
            self._moved.clear()
            await self._moved.wait()

    def close(self) -> None:
        """Listen no more and cut what is left."""
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
        """One of ours has ended."""
        self._moved.set()

    def left(self, passage: _Passage, peer: str) -> None:
        """One of ours is closed."""
        self.moved()
        self._passing.discard(passage)
        self.gate.leave(peer)


def sender_of(peer: str) -> str:
    """The sender's address in gRPC's word for a connection that came through a front; '' for another."""
    words = unquote(peer).removeprefix("unix-abstract:").split("/", 3)
    return words[3] if len(words) == 4 and words[0] == _PREFIX else ""


class _Passage:
    """One sender's connection, and from its first bytes on the one to gRPC."""

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
        """Whether gRPC has it, and has not said all."""
        return self._grpc is not None and not self._ended

    def close(self) -> None:
        """Both ends, at once; works twice."""
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
        """The sender has said something, or hung up."""
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
        except (BlockingIOError, InterruptedError):  # a false alarm
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
                log.debug("gRPC took no connection: %s", error)
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
        """Bytes came."""
        if pump is self._forth:
            self._received_at = self._loop.time()

    def ended(self, target: socket.socket) -> None:
        """One side has said all: tell the other, and give what is on its way a moment."""
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
        """Whether the sender has been silent for too long; a half-open connection is."""
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
    """Moves bytes one way: read and sent in one step; what the other side does not take stops the reading.

    Not asyncio's transports: they copy each piece once more and send it one turn of the loop later.
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
        """Wait for bytes."""
        self._reading = True
        self._loop.add_reader(self._source.fileno(), self._readable)

    def stop(self) -> None:
        """Wait for nothing more."""
        if self._reading:
            self._loop.remove_reader(self._source.fileno())
            self._reading = False
        if self._rest:
            self._loop.remove_writer(self._target.fileno())
            self._rest = b""

    def send(self, piece: memoryview) -> None:
        """All of it, now or as soon as it is taken."""
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
