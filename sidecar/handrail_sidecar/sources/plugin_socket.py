"""The plugin source: a datagram socket for the engine's processes.

It also merges their events.
The socket is bound at a path of the file system (a volume that engine and sidecar share). Its permissions are the only access
control: 0600, or 0660 when the folder's set-group-id bit names a group, since the engine often runs as another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from handrail.metrics.histogram import Histogram
from handrail.plugin.events import CORE, MAX_DATAGRAM_BYTES
from handrail.records import EngineTimes, Observation, Process, ProcessEvent, ProcessEventKind, Sink
from handrail.wal.filesystem import make_folder
from handrail_sidecar.links.peers import PeerTally
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.plugin_merge.bounds import MergeLimits
from handrail_sidecar.plugin_merge.handoff_counters import HandOffTally, outcome_of
from handrail_sidecar.plugin_merge.merge import Line, Merge
from handrail_sidecar.plugin_merge.stamps import Stamps
from handrail_sidecar.sources.datagram import read_packet

_GONE = (ProcessEventKind.DEAD, ProcessEventKind.STOPPED)


class Restarts:
    """Counts starts of the engine's core that follow an end of one.

    Source: the plugin's events.
    ``count``: since the sidecar's start.
    """

    def __init__(self) -> None:
        self.count = 0
        self._gone = 0  # cores that ended and are not replaced yet

    def take(self, event: ProcessEvent) -> None:
        if event.process_kind != CORE:
            return
        if event.kind in _GONE:
            self._gone += 1
        elif event.kind is ProcessEventKind.RESTARTED:
            self.count += 1
        elif event.kind is ProcessEventKind.STARTED and self._gone:
            self._gone -= 1
            self.count += 1


log = logging.getLogger(__name__)

TICK_S: Final = 0.5
OWN_PAUSE_NS: Final = 2_000_000_000
"""Time between two calls of ``look`` above which this process did not listen."""

READS_A_TURN: Final = 64  # datagrams before other tasks of the loop get their turn
RECEIVE_BYTES: Final = 4 << 20
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


@dataclass(slots=True)
class PluginStats:
    """Counts since start."""

    datagrams: int = 0
    bad_datagrams: int = 0
    records: int = 0


class PluginSource:
    """Listens at ``path`` for datagrams of the plugin.

    ``line`` takes the engine's log lines (when, level, text); by default they are dropped. ``live`` takes first tokens and ends
    as they come; with ``count_exchanges`` those of the middleware's exchanges too. ``make``: the kind of histogram.
    ``start`` raises ``OSError`` when the path cannot be bound, ``FileExistsError`` when another sidecar listens there or the path
    is no socket.
    """

    def __init__(
        self,
        path: Path,
        process: Process,
        sink: Sink,
        *,
        line: Line | None = None,
        limits: MergeLimits | None = None,
        live: LiveRequests | None = None,
        count_exchanges: bool = True,
        make: type[Histogram] = Histogram,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = path
        self.stats = PluginStats()
        self.stamps = Stamps()
        self.hand_offs = HandOffTally(make)
        self.peers = PeerTally(outcome_of)
        self.merge = Merge(
            process,
            exists=process_exists,
            line=line or _ignore,
            limits=limits,
            live=live,
            count_exchanges=count_exchanges,
        )
        self.restarts = Restarts()
        self._live = live
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._socket: socket.socket | None = None
        self._inode: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked_ns = self._listening_ns = clock()

    async def start(self) -> None:
        self._socket = bind(self.path)
        self._inode = self.path.stat().st_ino
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._read)
        self._timer = loop.call_later(TICK_S, self._tick)
        log.info("the plugin's socket is %s", self.path)

    async def shutdown(self, drain_seconds: float) -> None:
        """Read what is there, pass on what is known, unbind.

        What is open is passed on as it stands: a later sidecar may receive its end.
        """
        bound, self._socket = self._socket, None
        if bound is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(bound.fileno())
        while (received := _receive(bound)) is not None:
            self._take(*received)
        now = self._clock()
        self._say(self.merge.tick(now, self._listening_ns))
        self._say(self.merge.close(now))
        bound.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # not that of a sidecar that has taken this one's place
                self.path.unlink()

    def open_since(self) -> Iterator[int]:
        """When each request that has not ended arrived, on the monotonic clock.

        The middleware provides it if it is set up.
        """
        exchanges = self.merge.exchanges
        if exchanges.stats.requests:
            return exchanges.open_since()
        return (request.queued_ns for request in self.merge.requests.open.values())

    def _read(self) -> None:
        for _ in range(READS_A_TURN):
            if self._socket is None or (received := _receive(self._socket)) is None:
                return
            self._take(*received)

    def _take(self, data: bytes, sender: int | None) -> None:
        self.stats.datagrams += 1
        try:
            packet = read_packet(data)
        except ValueError:
            self.stats.bad_datagrams += 1
            return
        before = sum(self.stamps.displaced.values())
        judged = self.stamps.judged(packet, self._clock(), self._wall())
        if judged is not packet and not before:
            log.warning(
                "pid %d (%s) sent impossible times; the sidecar counts them and uses the arrival of its datagrams "
                '(docs/plugin.md, "Impossible times")',
                packet.pid,
                packet.kind,
            )
        self._say(self.merge.take(judged, sender))

    def _tick(self) -> None:
        if self._socket is None:
            return
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.look()

    def look(self) -> None:
        """Read what waits and pass on what has settled.

        It runs ``TICK_S`` after the last call, or later when this process stood still.
        Datagrams sent in such a pause may be lost, as the socket holds only so many: the processes do not count as silent then.
        """
        self._read()
        now = self._clock()
        if now - self._looked_ns > OWN_PAUSE_NS:
            self._listening_ns = now
        self._looked_ns = now
        self._say(self.merge.tick(now, self._listening_ns))

    def _say(self, records: list[Observation]) -> None:
        self.stats.records += len(records)
        for record in records:
            self.hand_offs.take(record)
            self.peers.take(record)
            if isinstance(record, ProcessEvent):
                self.restarts.take(record)
            elif self._live is not None and isinstance(record, EngineTimes) and not record.provisional:
                self._live.engine_ended(self.merge.engine.known.get("model"), record)
            self._sink(record)


def bind(path: Path) -> socket.socket:
    """Bind a non-blocking datagram socket with credentials of the senders.

    A socket without a listener is removed first.
    """
    make_folder(path.parent)
    _clear(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        shared = bool(path.parent.stat().st_mode & stat.S_ISGID)
        before = os.umask(0o117 if shared else 0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
    except BaseException:
        made.close()
        raise
    return made


def process_exists(pid: int) -> bool | None:
    """Whether ``pid`` exists, zombies excepted; None when that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return not fields.rpartition(b")")[2].lstrip().startswith((b"Z", b"X"))


def _clear(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "exists and is not a socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(errno.EEXIST, "another sidecar listens there", str(path))


def _receive(bound: socket.socket) -> tuple[bytes, int | None] | None:
    """Receive one datagram and its sender's pid; None when there is none.

    The pid is as named here, None in another pid namespace.
    """
    try:
        data, ancillary, _, _ = bound.recvmsg(MAX_DATAGRAM_BYTES + 1, _ANCILLARY)
    except OSError:  # none there; an error of a datagram socket concerns one datagram
        return None
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(content) >= _CREDENTIALS.size:
            pid: int = _CREDENTIALS.unpack_from(content)[0]
            return data, pid or None
    return data, None


def _ignore(unix_ns: int, level: str, line: str) -> None:
    """Drop lines: no log source reads them."""
