"""The sidecar's bounded spool: export requests in order, kept until the collector has acknowledged them.

On disk in a folder, or in memory with the same bound where none is given. A folder survives the death of the sidecar, not a
power loss: nothing is synced, since the durability promise starts at the collector's journal (DESIGN section 3) and a sync a
batch would put the disk's latency on the engine's exporter. Bytes are kept as they were given, sender id and batch sequence
inside, so what is sent again after a restart is recognised as a duplicate.

When it is full the newest is refused, not the oldest dropped: the oldest are numbered already (a hole in the sequence would read
as loss), the tap's are acknowledged to their engine, and the beginning of an outage is what explains it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from handrail.files import Files, MemoryFiles, OsFiles
from handrail.otlp.contract import Signal
from handrail.segments import Damage, Limits, SegmentLog

KIND_OF_SIGNAL: Final = {Signal.TRACES: 1, Signal.METRICS: 2, Signal.LOGS: 3}
SIGNAL_OF_KIND: Final = {kind: signal for signal, kind in KIND_OF_SIGNAL.items()}
"""The record kinds of a segmented log of export requests: of the spool and of the collector's journal."""

_ACKNOWLEDGED: Final = "acknowledged"
_MEMORY: Final = "/spool"


@dataclass(frozen=True, slots=True)
class Spooled:
    """One export request of the spool; ``next_offset`` acknowledges it and all before it."""

    offset: int
    next_offset: int
    signal: Signal
    at_unix_ns: int
    payload: bytes


class Spool:
    """Opened by construction. One thread only; every call is short: writes go to the page cache.

    Raises ``BlockingIOError`` where another process has the folder, ``OSError`` where it cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        max_bytes: int,
        *,
        files: Files | None = None,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> None:
        self._folder = _MEMORY if folder is None else os.fspath(folder)
        self._files: Files = files or (MemoryFiles() if folder is None else OsFiles())
        self.acknowledged = _read_offset(self._files, os.path.join(self._folder, _ACKNOWLEDGED))
        self._log = SegmentLog(
            self._folder, Limits.within(max_bytes), files=self._files, floor=self.acknowledged, on_damage=on_damage
        )
        self.acknowledged = max(self.acknowledged, self._log.begin)
        self._log.drop_before(self.acknowledged)

    @property
    def waiting_bytes(self) -> int:
        """Bytes not yet acknowledged."""
        return self._log.end - self.acknowledged

    @property
    def damaged_bytes(self) -> int:
        """Bytes that could not be read back, so were never sent."""
        return self._log.damaged_bytes

    @property
    def torn_bytes(self) -> int:
        """Bytes cut off at opening: a batch half written when the process or the machine died."""
        return self._log.recovery.torn_bytes

    @property
    def max_payload_bytes(self) -> int:
        return self._log.limits.max_record_bytes

    def put(self, signal: Signal, payload: bytes, at_unix_ns: int) -> int:
        """Keep ``payload`` and return its offset.

        Raises ``segments.Full``, ``ValueError`` above ``max_payload_bytes``, ``OSError`` where the disk fails.
        """
        return self._log.append(KIND_OF_SIGNAL[signal], payload, at_unix_ns)

    def first(self) -> Spooled | None:
        """The oldest request that is not acknowledged, or None. The same one until ``acknowledge``."""
        for record in self._log.read(self.acknowledged):
            signal = SIGNAL_OF_KIND.get(record.kind)
            if signal is not None:
                return Spooled(record.offset, record.next_offset, signal, record.at_unix_ns, record.payload)
        self.acknowledged = self._log.end  # nothing readable is left: damage, or a kind of a later version
        return None

    def acknowledge(self, next_offset: int) -> None:
        """Forget everything below ``next_offset``; remembered over a restart.

        Raises ``OSError`` where that cannot be written: then a restart sends it again.
        """
        self.acknowledged = next_offset
        self._log.drop_before(next_offset)
        path = os.path.join(self._folder, _ACKNOWLEDGED)
        fd = self._files.open_append(path + ".new")
        try:
            self._files.truncate(fd, 0)
            self._files.write(fd, (_offset_line(next_offset),))
        finally:
            self._files.close(fd)
        self._files.rename(path + ".new", path)

    def close(self) -> None:
        self._log.close()


def _offset_line(offset: int) -> bytes:
    """What the file of the acknowledged offset holds. Without its checksum one bit would skip batches that nobody has."""
    digits = b"%d" % offset
    return b"%b crc32=%08x\n" % (digits, zlib.crc32(digits))


def _read_offset(files: Files, path: str) -> int:
    """The acknowledged offset; 0, which sends everything again, where none was written or it cannot be read."""
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
