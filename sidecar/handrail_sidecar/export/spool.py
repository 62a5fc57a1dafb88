"""The sidecar's bounded spool of export requests.

It keeps them in order until the collector has acknowledged them.
It is on disk in a folder, or in memory with the same bound without one. A folder survives the death of the sidecar, not a
power loss: nothing is synced, since the durability promise starts at the collector's journal (DESIGN section 3) and a sync a
batch would put the disk's latency on the engine's exporter. Bytes are kept unchanged, sender id and batch sequence inside, so
what is sent again after a restart is recognised as a duplicate.

A full spool refuses the newest request and does not drop the oldest: the oldest are numbered already (a hole in the sequence
would read as loss), the tap's are acknowledged to their engine, and the beginning of an outage is what explains it.

While the disk fails, batches are held in memory behind those on disk, and move to the disk, in order, once it works again
(``repair``). A full disk counts as failing only while the spool waits for the collector: else its own file is emptied first.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from handrail.otlp.signals import KIND_OF_SIGNAL, SIGNAL_OF_KIND, Signal
from handrail.wal.filesystem import OUT_OF_DESCRIPTORS, Filesystem, MemoryFiles, OsFiles
from handrail.wal.log import Damage, DiskFull, FolderGoneError, Full, LogLimits, NoDescriptors, SegmentLog, Stored
from handrail.wal.segment_file import HEADER_BYTES

_LOG = logging.getLogger(__name__)


HELD_BYTES: Final = 16 << 20
"""Most bytes held in memory while the disk fails.

``max_bytes`` applies if it is less. A batch above the limit is held alone.
"""

READ_TRIES: Final = 5
"""Attempts to read a batch back before its segment is given up."""

_ACKNOWLEDGED: Final = "acknowledged"
_MEMORY: Final = "/spool"


@dataclass(frozen=True, slots=True)
class Spooled:
    """One export request of the spool.

    ``next_offset`` acknowledges it and all before it. Offsets below 0 are of batches held in memory beside a disk that fails.
    """

    offset: int
    next_offset: int
    signal: Signal
    at_unix_ns: int
    payload: bytes


class Spool:
    """Bounded queue of export requests, opened by construction.

    One thread only; every call is short: writes go to the page cache.
    Raises ``BlockingIOError`` when another process has the folder, ``OSError`` when the folder cannot be used. After that no
    method but ``first`` raises ``OSError``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        max_bytes: int,
        *,
        files: Filesystem | None = None,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> None:
        self.errors = 0  # calls that failed
        self._folder = _MEMORY if folder is None else os.fspath(folder)
        self._files: Filesystem = files or (MemoryFiles() if folder is None else OsFiles())
        self._limits = LogLimits.within(max_bytes)
        self._on_damage = on_damage
        self._held: deque[Spooled] = deque()
        self._held_bytes = 0
        self._most_held_bytes = min(max_bytes, HELD_BYTES)
        self._numbers = itertools.count(1)  # of held batches
        self._given = self._given_now = 0  # next offset of what `first` returned: the one returned, and the batch's offset now
        self._write_trouble = self._read_trouble = ""
        self._failed_reads = 0
        self._lost_bytes = 0
        self._end = 0  # of the previous log, while there is none
        self._log: SegmentLog | None
        self.acknowledged = _read_offset(self._files, os.path.join(self._folder, _ACKNOWLEDGED))
        self._log = self._opened(self.acknowledged)
        self.torn_bytes = self._log.recovery.torn_bytes
        self.acknowledged = max(self.acknowledged, self._log.begin)
        self._log.drop_before(self.acknowledged)

    @property
    def waiting_bytes(self) -> int:
        """Bytes not yet acknowledged, on disk and in memory."""
        return self._on_disk_bytes + self._held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes not yet acknowledged that are in memory because the disk fails.

        The death of the process loses them.
        """
        return self._held_bytes

    @property
    def damaged_bytes(self) -> int:
        """Bytes that could not be read back, so were never sent."""
        return self._lost_bytes + (self._log.damaged_bytes if self._log is not None else 0)

    @property
    def max_payload_bytes(self) -> int:
        return self._limits.max_record_bytes

    @property
    def trouble(self) -> str:
        """What fails on the disk; '' while nothing does."""
        return self._write_trouble or self._read_trouble

    @property
    def needs_repair(self) -> bool:
        """Whether ``repair`` has something to do."""
        return bool(self._write_trouble or self._held)

    def put(self, signal: Signal, payload: bytes, at_unix_ns: int) -> None:
        """Keep ``payload``: on disk, or in memory while that fails.

        Raises ``segments.Full`` and ``ValueError`` above ``max_payload_bytes``.
        """
        if len(payload) > self.max_payload_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes is above the limit of {self.max_payload_bytes}")
        if self._log is not None and not self._held and not self._write_trouble:
            try:
                self._append(self._log, signal, payload, at_unix_ns)
                return
            except (DiskFull, NoDescriptors, OSError) as error:
                self._fail(error)
        self._hold(signal, payload, at_unix_ns)

    def first(self) -> Spooled | None:
        """The oldest request that is not acknowledged, or None.

        It stays the same one until ``acknowledge``. Raises ``OSError`` when it cannot be read now; try again later.
        """
        found = self._first_on_disk()
        if found is None and self._held:
            found = self._held[0]
        if found is not None:
            self._given = self._given_now = found.next_offset
        return found

    def acknowledge(self, next_offset: int) -> None:
        """Forget everything below ``next_offset``.

        It stays forgotten over a restart; if that cannot be written, it is sent again.
        """
        if next_offset == self._given:
            next_offset = self._given_now
        if next_offset < 0:
            batch = self._held.popleft()
            self._held_bytes -= _size(batch.payload)
            return
        self.acknowledged = next_offset
        if self._log is None:
            return
        try:
            self._log.drop_before(next_offset)
            self._remember()
        except OSError as error:
            self._fail(error)

    def repair(self) -> bool:
        """Try the disk again, and move what is held in memory there; True when it works."""
        if not self.needs_repair:
            return True
        try:
            log = self._repaired()
            self._remember()
            while self._held:
                self._move(log, self._held[0])
        except (DiskFull, NoDescriptors, OSError) as error:
            self._fail(error)
            return False
        except Full:
            pass  # the bound is the reason, not the disk: held batches follow when there is room
        if self._write_trouble:
            _LOG.warning("spool %s: the disk accepts batches again", self._folder)
            self._write_trouble = ""
        return True

    def held(self) -> Iterator[Spooled]:
        """Batches that are only in memory, oldest first."""
        return iter(tuple(self._held))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    @property
    def _on_disk_bytes(self) -> int:
        return 0 if self._log is None else self._log.end - self.acknowledged

    def _opened(self, floor: int) -> SegmentLog:
        return SegmentLog(self._folder, self._limits, files=self._files, floor=floor, on_damage=self._on_damage)

    def _append(self, log: SegmentLog, signal: Signal, payload: bytes, at_unix_ns: int) -> int:
        """Write to the disk; return the next offset.

        When the disk is full, it writes into the room of its own file if nothing in that is needed.
        """
        log.require_in_place()
        try:
            log.append(KIND_OF_SIGNAL[signal], payload, at_unix_ns)
        except DiskFull:
            if self.acknowledged < log.end or not log.size():
                raise
            log.start_anew()
            log.append(KIND_OF_SIGNAL[signal], payload, at_unix_ns)
        return log.end

    def _hold(self, signal: Signal, payload: bytes, at_unix_ns: int) -> None:
        size = _size(payload)
        if self._held and self._held_bytes + size > self._most_held_bytes:
            raise Full(f"{self._held_bytes} of {self._most_held_bytes} bytes held in memory")
        number = -2 * next(self._numbers)
        self._held.append(Spooled(number + 1, number, signal, at_unix_ns, payload))
        self._held_bytes += size

    def _move(self, log: SegmentLog, batch: Spooled) -> None:
        """Put a held batch on the disk, behind what is there."""
        next_offset = self._append(log, batch.signal, batch.payload, batch.at_unix_ns)
        if batch.next_offset == self._given_now:
            self._given_now = next_offset
        self._held.popleft()
        self._held_bytes -= _size(batch.payload)

    def _repaired(self) -> SegmentLog:
        """Return a log that is fit for use again. Raises ``OSError``.

        It is a new one when the folder has gone.
        """
        if self._log is not None:
            try:
                self._log.require_in_place()
                self._log.repair()
            except FolderGoneError:
                self._abandon(self._log)
            else:
                if self.acknowledged == self._log.end and self._log.size():
                    self._log.start_anew()
                return self._log
        log = self._opened(self._end)
        # At the old end the folder is the spool's own, come back, or an empty one: its waiting batches were taken into memory.
        found = log.end if log.end == self._end else _read_offset(self._files, os.path.join(self._folder, _ACKNOWLEDGED))
        self.acknowledged = max(found, log.begin)
        self._log = log
        return log

    def _abandon(self, log: SegmentLog) -> None:
        """Close a log whose files have no names.

        What waits in it moves into memory as far as the limit allows.
        """
        waiting = log.end - self.acknowledged
        behind, self._held, self._held_bytes = self._held, deque(), 0
        try:
            for record in log.rescue(self.acknowledged):
                signal = SIGNAL_OF_KIND.get(record.kind)
                if signal is not None:
                    self._take_over(record, signal)
                    waiting -= record.next_offset - record.offset
        except (Full, OSError) as error:
            _LOG.warning("spool %s: some waiting batches are lost: %s", self._folder, error)
        self._held += behind
        self._held_bytes += sum(_size(batch.payload) for batch in behind)
        self._lost_bytes += waiting + log.damaged_bytes
        self._end = self.acknowledged = log.end
        self._log = None
        log.close()

    def _take_over(self, record: Stored, signal: Signal) -> None:
        """Hold in memory what was on disk."""
        self._hold(signal, record.payload, record.at_unix_ns)
        if record.next_offset == self._given_now:
            self._given_now = self._held[-1].next_offset

    def _first_on_disk(self) -> Spooled | None:
        log = self._log
        if log is None or self.acknowledged >= log.end:
            return None
        try:
            log.require_in_place()
            found = self._read(log)
        except FolderGoneError as error:
            self._fail(error)
            return None
        except OSError as error:
            self._fail_reading(log, error)
            raise
        if self._read_trouble:
            _LOG.warning("spool %s: readable again", self._folder)
        self._read_trouble, self._failed_reads = "", 0
        return found

    def _read(self, log: SegmentLog) -> Spooled | None:
        for record in log.read(self.acknowledged):
            signal = SIGNAL_OF_KIND.get(record.kind)
            if signal is not None:
                return Spooled(record.offset, record.next_offset, signal, record.at_unix_ns, record.payload)
        self.acknowledged = log.end  # nothing readable is left: damage, or a kind of a later version
        return None

    def _fail_reading(self, log: SegmentLog, error: OSError) -> None:
        self.errors += 1
        if not self._read_trouble:
            _LOG.error("spool %s: cannot be read, the sidecar retries: %s", self._folder, error)
        self._read_trouble = _reason(error)
        if error.errno in OUT_OF_DESCRIPTORS:
            return
        self._failed_reads += 1
        if self._failed_reads >= READ_TRIES:
            following = log.next_segment(self.acknowledged)
            lost = following - self.acknowledged
            _LOG.error("spool %s: dropped %d bytes after %d failed reads: %s", self._folder, lost, READ_TRIES, error)
            self._lost_bytes += lost
            self.acknowledged, self._failed_reads = following, 0

    def _fail(self, error: Full | OSError) -> None:
        """Count a failure, and log it once an episode."""
        self.errors += 1
        if isinstance(error, FolderGoneError) and self._log is not None:
            self._abandon(self._log)
        if not self._write_trouble:
            _LOG.error(
                "spool %s: %s; the sidecar keeps evidence in memory, at most %d bytes, until the disk accepts it",
                self._folder,
                error,
                self._most_held_bytes,
            )
        self._write_trouble = _reason(error)

    def _remember(self) -> None:
        """Write down the acknowledged offset."""
        path = os.path.join(self._folder, _ACKNOWLEDGED)
        fd = self._files.open_append(path + ".new")
        try:
            self._files.truncate(fd, 0)
            self._files.write(fd, (_offset_line(self.acknowledged),))
        finally:
            self._files.close(fd)
        self._files.rename(path + ".new", path)


def _size(payload: bytes) -> int:
    return HEADER_BYTES + len(payload)


def _reason(error: Full | OSError) -> str:
    code = error.errno if isinstance(error, OSError) else getattr(error.__cause__, "errno", None)
    return os.strerror(code) if isinstance(code, int) and code != errno.ENOENT else str(error)


def _offset_line(offset: int) -> bytes:
    """Content of the file with the acknowledged offset.

    It has a checksum: without one, a wrong bit would skip batches that the collector does not have.
    """
    digits = b"%d" % offset
    return b"%b crc32=%08x\n" % (digits, zlib.crc32(digits))


def _read_offset(files: Filesystem, path: str) -> int:
    """Read the acknowledged offset.

    0, which sends everything again, when none was written or it cannot be read.
    """
    try:
        fd = files.open_read(path)
    except FileNotFoundError:
        return 0
    try:
        text = files.read_at(fd, 64, 0).strip()
    finally:
        files.close(fd)
    digits, checked, _ = text.partition(b" ")
    if not digits.isdigit() or (checked and text + b"\n" != _offset_line(int(digits))):
        return 0
    return int(digits)  # without a checksum: written by an earlier version
