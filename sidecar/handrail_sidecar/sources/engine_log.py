"""The log tap: follows the engine's log files or pipes and reads facts about KV.

The patterns of lines are in ``engine_logs/lines.py``.
Reading and matching run in a thread (a log may lie on a slow disk), one call at a time. Facts are passed on as soon as their
first line is read. The position in a file is saved only when everything read before it was taken over, so a restart repeats
lines and loses none; repeated facts carry the same ids. A pipe is read as it comes and has no position.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from pathlib import Path
from typing import Final

from handrail.records import LineClock, LogFact, Process, Source
from handrail_sidecar.engine_logs.aggregate import Folder, FoldSettings
from handrail_sidecar.engine_logs.line_header import Head, read_head
from handrail_sidecar.engine_logs.lines import recognise
from handrail_sidecar.sources.log_tail import FileTail, LineSplitter, Position, TailSettings, TailStats

log = logging.getLogger(__name__)

STDIN: Final = "-"
_PIPE_BYTES: Final = 1 << 16
_MOST_WAITING_BYTES: Final = 4 << 20
_SAVE_EVERY_S: Final = 1.0
_MAX_REMEMBERED: Final = 20_000
OLDEST_NS: Final = 3_650 * 86_400 * 10**9  # no log has lines that are older than its last write by more than this

Take = Callable[[Sequence[LogFact]], Awaitable[bool]]
"""Takes facts over; False when it cannot now.

The same facts are then offered again. It never raises.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Settings of the log tap.

    ``paths``: files or named pipes; ``-`` is standard input. ``positions``: the folder that keeps positions; None: none are kept.
    ``most_disagreement_ns``: a new line whose own time differs by more than this was stamped in another time zone, or by a wrong
    clock. The time of receipt then counts.
    """

    paths: tuple[str, ...]
    tail: TailSettings = field(default_factory=TailSettings)
    fold: FoldSettings = field(default_factory=FoldSettings)
    positions: Path | None = None
    interval_s: float = 0.2
    most_disagreement_ns: int = 120 * 10**9
    zone: tzinfo | None = None


@dataclass(slots=True)
class LogStats:
    """Counts since start, besides those of the tails and the folder."""

    clocks_disagree: int = 0  # lines whose own time was not believed
    faults: int = 0  # errors of the sidecar while reading a line


class _Pipe:
    """Standard input or a named pipe, read by the event loop, as whole lines.

    It stops reading while much waits.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.stats = TailStats()
        self._lines = LineSplitter(self.stats)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._fd = -1
        self._reading = False
        self._polled = False  # standard input from a file or a device like /dev/null is always readable; epoll refuses it
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Open the pipe and begin to read. Raises ``OSError``."""
        # Opened for writing too: a named pipe then does not end when a writer leaves, and opening does not wait for one.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.dup(sys.stdin.fileno()) if self.path == STDIN else os.open(self.path, flags)
        mode = os.fstat(self._fd).st_mode
        if self.path != STDIN and not stat.S_ISFIFO(mode):  # something else took its place since the check
            os.close(self._fd)
            self._fd = -1
            raise OSError(errno.EINVAL, "is no longer a named pipe", self.path)
        self._polled = stat.S_ISREG(mode)
        self._loop = asyncio.get_running_loop()
        self._resume()

    def take(self) -> list[str]:
        """The lines since the last call."""
        if self._polled and self._fd >= 0:
            self._readable()
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._resume()
        return self._lines.feed(data) if data else []

    def close(self) -> list[str]:
        """Stop; return the last line if it has no end."""
        self._pause()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return self._lines.end()

    def _resume(self) -> None:
        if not self._reading and not self._polled and self._fd >= 0 and self._loop is not None:
            try:
                self._loop.add_reader(self._fd, self._readable)
            except PermissionError:
                self._polled = True
            else:
                self._reading = True

    def _pause(self) -> None:
        if self._reading and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._reading = False

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.stats.errors += 1
            log.warning("the sidecar stopped reading log pipe %s: %s", self.path, error.strerror or error)
            data = b""
        if not data:
            self._pause()
            os.close(self._fd)
            self._fd = -1
            return
        self.stats.bytes_read += len(data)
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= _MOST_WAITING_BYTES:
            self._pause()


class LogSource:
    """Source of log files and pipes.

    ``start`` opens what is there. ``shutdown`` reads what came since and passes it on.
    """

    def __init__(
        self,
        settings: LogSettings,
        process: Process,
        take: Take,
        *,
        now_unix_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = LogStats()
        self.folder = Folder(process, Source.LOG, settings.fold)
        self._settings = settings
        self._take = take
        self._now = now_unix_ns
        self._monotonic_s = monotonic_s
        self._tails = [FileTail(Path(path), settings.tail, self._saved(path)) for path in settings.paths if not _is_pipe(path)]
        self._pipes = [_Pipe(path) for path in settings.paths if _is_pipe(path)]
        self._remembered: deque[tuple[int, str, str]] = deque(maxlen=_MAX_REMEMBERED)
        self._pending: list[LogFact] = []
        self._next_save_s = 0.0
        self._kept: dict[Path, Position] = {}
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @property
    def tail_stats(self) -> list[tuple[str, TailStats]]:
        """Counts by file or pipe."""
        return [(str(tail.path), tail.stats) for tail in self._tails] + [(pipe.path, pipe.stats) for pipe in self._pipes]

    def say(self, at_unix_ns: int, level: str, message: str) -> None:
        """Take a message that came another way (the plugin's log handler).

        It has no prefix. It is folded with the lines of the files.
        """
        self._remembered.append((at_unix_ns, level, message))

    async def start(self) -> None:
        """Begin to read. A file may come later.

        Raises ``OSError`` for a pipe that cannot be opened.
        """
        for pipe in self._pipes:
            pipe.start()
        for tail in self._tails:
            if not await asyncio.to_thread(tail.path.exists):
                log.info("log file %s does not exist yet; the sidecar will read it from its beginning", tail.path)
        await self._round()  # from here on, appended lines are read
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        if self._task is None:
            return
        self._stop.set()
        task, self._task = self._task, None
        await task
        await self._round(last=True)
        for tail in self._tails:
            tail.close()

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                behind = await self._round()
            except Exception:
                self._fault()
                behind = False
            if not behind:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._settings.interval_s)

    async def _round(self, *, last: bool = False) -> bool:
        """Read once, pass on, save positions; True when more waits to be read."""
        piped = [line for pipe in self._pipes for line in [*pipe.take(), *(pipe.close() if last else ())]]
        behind = await asyncio.to_thread(self._read, piped)
        self._pending += self.folder.take(self._now(), all_of_them=last)
        if self._pending:
            if not await self._take(self._pending):
                too_many = max(0, len(self._pending) - self._settings.fold.most_facts)
                del self._pending[:too_many]
                self.folder.stats.dropped += too_many
                return False
            self._pending.clear()
        if last or self._monotonic_s() >= self._next_save_s:
            self._next_save_s = self._monotonic_s() + _SAVE_EVERY_S
            await asyncio.to_thread(self._save)
        return behind

    def _read(self, piped: Sequence[str]) -> bool:
        now = self._now()
        for _ in range(len(self._remembered)):
            at, level, message = self._remembered.popleft()
            try:
                self._message(Head(message, level, at, LineClock.LINE, 1), now)
            except Exception:
                self._fault()
        for line in piped:
            self._line(line, now, now, live=True)
        behind = False
        for tail in self._tails:
            live, problem = tail.caught_up, tail.problem
            for line in tail.poll():
                self._line(line, min(tail.written_unix_ns, now), now, live=live)  # a file's stamp may lie ahead, too
            if tail.problem != problem:
                _tell(tail)
            behind = behind or not tail.caught_up
        return behind

    def _line(self, text: str, near_ns: int, now_ns: int, *, live: bool) -> None:
        try:
            head = read_head(text, near_ns, self._settings.zone)
            self._message(self._believed(head, near_ns, now_ns, live=live), now_ns if live else near_ns)
        except Exception:
            self._fault()

    def _message(self, head: Head, receipt_ns: int) -> None:
        line = recognise(head.message)
        if line is None:
            self.folder.continued(head)
        else:
            self.folder.add(head, line, receipt_ns)

    def _fault(self) -> None:
        """Count and log an error in reading a line.

        A line is external input, so an error must not end the reading. Call it inside the ``except`` block.
        """
        self.stats.faults += 1
        if self.stats.faults == 1:
            log.exception("reading a log line failed")

    def _believed(self, head: Head, near_ns: int, now_ns: int, *, live: bool) -> Head:
        """Choose the time of a line: its own, or the time of receipt.

        An old line keeps its own time, unless that lies ahead or many years before the file was last written.
        """
        apart = self._settings.most_disagreement_ns
        earliest = now_ns - apart if live else near_ns - OLDEST_NS
        if head.at_unix_ns is None or earliest <= head.at_unix_ns <= now_ns + apart:
            return head
        self.stats.clocks_disagree += 1
        return replace(head, at_unix_ns=None, clock=LineClock.RECEIPT, resolution_ns=0)

    def _saved(self, path: str) -> Position | None:
        where = self._position_file(Path(path))
        return None if where is None else Position.load(where)

    def _save(self) -> None:
        for tail in self._tails:
            where, position = self._position_file(tail.path), tail.position
            if where is None or position is None or self._kept.get(where) == position:
                continue
            with contextlib.suppress(OSError):  # then a restart repeats more
                position.save(where)
                self._kept[where] = position

    def _position_file(self, path: Path) -> Path | None:
        if self._settings.positions is None:
            return None
        name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=8).hexdigest()
        return self._settings.positions / f"{name}.position"


def _tell(tail: FileTail) -> None:
    """Log that a log file became something else, or is a file again."""
    if tail.problem:
        what = "restart the sidecar to read a pipe" if "pipe" in tail.problem else "put a file there"
        log.warning("log file %s now %s, and the sidecar does not read it: %s", tail.path, tail.problem, what)
    else:
        log.info("the sidecar reads log file %s again", tail.path)


def _is_pipe(path: str) -> bool:
    if path == STDIN:
        return True
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
