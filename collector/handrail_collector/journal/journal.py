"""Journal export requests on disk before they are acknowledged.

All requests that wait at the same time share one sync. The event loop never touches the disk.
One thread owns the log: it writes and syncs whatever gathered while it was busy, so a slower disk makes larger groups
(DESIGN section 8). A second thread reads for followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import StatusCode, Tracer

from handrail import conventions as names
from handrail.otlp.signals import KIND_OF_SIGNAL, SIGNAL_OF_KIND, ReceiverUnavailable, Rejected, Retryable, Signal
from handrail.telemetry.tracing import NO_TRACES, about_own_traces
from handrail.wal.filesystem import OUT_OF_DESCRIPTORS, Filesystem
from handrail.wal.log import Damage, FolderGoneError, Full, LogLimits, NoDescriptors, SegmentLog, Stored

_LOG = logging.getLogger(__name__)
_READ_AHEAD_BYTES: Final = 4 << 20
DESCRIPTOR_RETRY_S: Final = 0.1
MOST_GROUPS: Final = 4096
"""Most groups whose receive times are remembered until a follower takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """Settings of the journal.

    ``max_pending_bytes`` bounds what waits for a sync, in addition to ``max_bytes`` on disk.
    """

    folder: str | os.PathLike[str]
    max_bytes: int = 4 << 30
    max_pending_bytes: int = 64 << 20
    retry_delay_s: float = 1.0

    def open_log(self, *, floor: int = 0, files: Filesystem | None = None) -> SegmentLog:
        """Open the log.

        ``floor``: the store's published offset, as in ``SegmentLog``. Raises what ``SegmentLog`` raises.
        """
        log = SegmentLog(self.folder, LogLimits.within(self.max_bytes), floor=floor, files=files, on_damage=_report)
        if torn := log.recovery.torn_bytes:
            _LOG.warning(
                "the journal ended with %d bytes of an incomplete record, which are cut off: a crash "
                "interrupted the write before "
                "its acknowledgement, or they were damaged later",
                torn,
            )
        return log


@dataclass(frozen=True, slots=True)
class Entry:
    """One journalled export request.

    ``next_offset``: where a follower continues after this entry.
    """

    offset: int
    next_offset: int
    signal: Signal
    received_unix_ns: int
    payload: bytes


@dataclass(slots=True)
class JournalStats:
    """Counts since start."""

    appended_records: int = 0
    appended_bytes: int = 0  # of payload
    syncs: int = 0
    sync_ns: int = 0  # time spent writing and syncing, all groups
    refused_full: int = 0  # over the bound on disk
    refused_busy: int = 0  # over the bound on what waits for a sync
    refused_unavailable: int = 0  # stopping, or the disk failed
    released_bytes: int = 0
    release_failures: int = 0
    unknown_records: int = 0  # records of a kind that this version does not know; skipped


@dataclass(slots=True, eq=False)
class _PendingAppend:
    signal: Signal
    payload: bytes
    received_unix_ns: int
    done: asyncio.Future[None]


class Journal:
    """The consumer that makes received export requests durable.

    It owns ``log`` from construction on. All methods belong to the loop that called ``start``.
    ``shutdown`` finishes accepted requests and closes the log without waiting for followers, which read to the end.
    ``shutdown`` is idempotent and works without ``start``.
    """

    def __init__(
        self,
        log: SegmentLog,
        *,
        max_pending_bytes: int = 64 << 20,
        retry_delay_s: float = 1.0,
        now_unix_ns: Callable[[], int] = time.time_ns,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._tracer = tracer
        self.stats = JournalStats()
        self.followed_offset = log.begin  # the largest offset that a follower has taken
        self.followed_unix_ns = 0  # when that entry was received
        self._opened_end = log.end
        self._untaken: deque[tuple[int, int]] = deque()  # per group: end offset, receive time of its first entry; newest last
        self._log = log
        self._max_pending_bytes = max_pending_bytes
        self._retry_delay_s = retry_delay_s
        self._now_unix_ns = now_unix_ns
        self._waiting: list[_PendingAppend] = []
        self._pending_bytes = 0
        self._committing: asyncio.Task[None] | None = None
        self._grown = asyncio.Condition()
        self._stopping = False
        self._stopped = False  # no entry will be added
        self._followers = 0
        self._broken = ""
        self._descriptors_short = False
        self._gone = asyncio.Event()
        self._folder_gone = False
        self._release_failing = False
        self._release_to = 0
        self._writer = ThreadPoolExecutor(1, "journal-write")
        self._reader = ThreadPoolExecutor(1, "journal-read")

    @property
    def end(self) -> int:
        """End of what is durable; everything below can be followed."""
        return self._log.synced

    @property
    def begin(self) -> int:
        """The oldest offset kept."""
        return self._log.begin

    @property
    def size_bytes(self) -> int:
        """Size of the journal on disk."""
        return self._log.size()

    @property
    def lag_bytes(self) -> int:
        """Bytes on disk that no follower has taken."""
        return max(0, self.end - self.followed_offset)

    @property
    def untaken_unix_ns(self) -> int | None:
        """When the oldest entry was received that no follower has taken; None without one.

        For entries of an earlier process, the receive time of the last taken entry is used, which is slightly earlier.
        """
        self._forget_taken()
        if self.followed_offset < min(self._opened_end, self.end):
            return self.followed_unix_ns or None
        return self._untaken[0][1] if self._untaken else None

    @property
    def torn_bytes(self) -> int:
        """Bytes cut off at opening: requests half written at a crash.

        None of them was acknowledged.
        """
        return self._log.recovery.torn_bytes

    @property
    def damaged_bytes(self) -> int:
        """Bytes skipped in reading because they hold no record.

        Acknowledged data may be lost.
        """
        return self._log.damaged_bytes

    @property
    def lost(self) -> str:
        """What was found deleted or replaced, and where; '' if nothing was."""
        return self._broken if self._gone.is_set() else ""

    @property
    def healthy(self) -> bool:
        """False after a disk failure; nothing is accepted until the process restarts."""
        return not self._broken

    def refuse(self, why: str) -> None:
        """Stop acknowledging; ``gone`` returns.

        Call it on the loop that called ``start``.
        """
        self._broken = self._broken or why
        self._gone.set()

    async def gone(self) -> None:
        """Wait until the folder is found deleted or replaced; the process must then end."""
        await self._gone.wait()

    async def start(self) -> None:
        """Sync what an earlier process wrote, so that no followed entry can vanish.

        Raises ``OSError``.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._log.sync)
        except Full as full:  # no sender is waiting yet that could be refused
            raise OSError(errno.ENOSPC, str(full)) from full

    async def consume(self, signal: Signal, payload: bytes) -> None:
        """Write ``payload`` and return once it is on disk.

        Raises ``Retryable`` when the journal is full or stopping, ``Rejected`` when the payload can never fit.
        """
        if self._stopping or self._broken:
            self.stats.refused_unavailable += 1
            raise ReceiverUnavailable(self._broken or "stopping", self._retry_delay_s)
        if len(payload) > self._log.limits.max_record_bytes:
            raise Rejected(f"a request of {len(payload)} bytes; the journal takes {self._log.limits.max_record_bytes}")
        if self._pending_bytes and self._pending_bytes + len(payload) > self._max_pending_bytes:
            self.stats.refused_busy += 1
            raise Retryable("the disk is behind", self._retry_delay_s)
        waiting = _PendingAppend(signal, payload, self._now_unix_ns(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._pending_bytes += len(payload)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_groups())
        await waiting.done

    async def follow(self, from_offset: int) -> AsyncIterator[Entry]:
        """Yield every entry on disk from ``from_offset`` on, then each new one.

        It ends after ``shutdown``, once everything on disk is read.
        Raises ``OSError`` when the files cannot be read. It waits out a lack of file descriptors.
        """
        self._followers += 1
        self.followed_offset = max(self.followed_offset, from_offset)
        try:
            async for record in self._records(from_offset):
                signal = SIGNAL_OF_KIND.get(record.kind)
                if signal is None:
                    self.stats.unknown_records += 1
                    continue
                if record.next_offset > self.followed_offset:
                    self.followed_offset, self.followed_unix_ns = record.next_offset, record.at_unix_ns
                yield Entry(record.offset, record.next_offset, signal, record.at_unix_ns, record.payload)
        finally:
            self._followers -= 1
            self._end_reading()

    async def _records(self, position: int) -> AsyncIterator[Stored]:
        loop = asyncio.get_running_loop()
        while True:
            async with self._grown:
                while self.end <= position and not self._stopped:
                    await self._grown.wait()
            if self.end <= position:
                return
            try:
                batch, position = await loop.run_in_executor(self._reader, self._take, position, self.end)
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
                await self._await_descriptors(error)
                continue
            self._descriptors_short = False
            for record in batch:
                yield record
            self.followed_offset = max(self.followed_offset, position)
            self._forget_taken()

    async def _await_descriptors(self, error: OSError) -> None:
        """Wait for others to release file descriptors; the data on disk is safe meanwhile."""
        if not self._descriptors_short:
            self._descriptors_short = True
            _LOG.warning("reading the journal fails: %s; the collector retries every %g s", error.strerror, DESCRIPTOR_RETRY_S)
        await asyncio.sleep(DESCRIPTOR_RETRY_S)

    def _forget_taken(self) -> None:
        while self._untaken and self._untaken[0][0] <= self.followed_offset:
            self._untaken.popleft()

    def release(self, offset: int) -> None:
        """Allow the removal of segments below ``offset``, because their data is stored.

        Returns at once.
        """
        if offset > self._release_to and not self._stopping:
            self._release_to = offset
            self._writer.submit(self._drop, offset)

    async def shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._committing is not None:
            await self._committing
        await asyncio.to_thread(self._close)
        self._stopped = True
        self._end_reading()
        async with self._grown:
            self._grown.notify_all()

    async def _commit_groups(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                refusals = await loop.run_in_executor(self._writer, self._commit, group)
            except Exception as fault:  # a bug in our code; no sender may wait for ever because of it
                refusals = [fault] * len(group)
            received = next((w.received_unix_ns for w, refusal in zip(group, refusals, strict=True) if refusal is None), None)
            if received is not None:
                self._note_untaken(self.end, received)
            if self._folder_gone:
                self._gone.set()
            for waiting, refusal in zip(group, refusals, strict=True):
                if refusal is None and self._gone.is_set():  # the store was found gone while this group was written
                    refusal = self._unavailable()
                self._pending_bytes -= len(waiting.payload)
                if waiting.done.cancelled():
                    continue  # its sender went away; the entry stays, and a second delivery counts as a duplicate
                if refusal is None:
                    waiting.done.set_result(None)
                else:
                    waiting.done.set_exception(refusal)
            async with self._grown:
                self._grown.notify_all()
        self._committing = None

    def _commit(self, group: list[_PendingAppend]) -> list[Exception | None]:
        """Write a group with one sync, in the writing thread.

        Returns the refusal of each request, or None.
        """
        started_ns = time.perf_counter_ns()
        traced = self._tracer is not NO_TRACES and not all(about_own_traces(waiting.payload) for waiting in group)
        tracer = self._tracer if traced else NO_TRACES
        size = sum(len(waiting.payload) for waiting in group)
        with tracer.start_as_current_span(
            names.OWN_COMMIT, attributes={names.OWN_RECORDS: len(group), names.OWN_BYTES: size}
        ) as span:
            refusals = [self._append(waiting) for waiting in group]
            with tracer.start_as_current_span(names.OWN_SYNC):
                refusals = self._sync(refusals)
            if refused := sum(refusal is not None for refusal in refusals):
                span.set_attribute(names.OWN_REFUSED, refused)
                span.set_status(StatusCode.ERROR, str(next(filter(None, refusals))))
        kept = [waiting for waiting, refusal in zip(group, refusals, strict=True) if refusal is None]
        self.stats.appended_records += len(kept)
        self.stats.appended_bytes += sum(len(waiting.payload) for waiting in kept)
        self.stats.syncs += 1
        self.stats.sync_ns += time.perf_counter_ns() - started_ns
        return refusals

    def _sync(self, refusals: list[Exception | None]) -> list[Exception | None]:
        """Sync a group; return the refusal of each request, or None."""
        try:
            self._log.sync()
        except Full as full:  # undone: none of the group is in the journal
            refusals = [refusal or self._refuse_full(full) for refusal in refusals]
        except OSError as error:
            refusals = [refusal or self._fail(error) for refusal in refusals]
        return refusals

    def _note_untaken(self, end: int, received_unix_ns: int) -> None:
        """Remember when a group was received; beyond the bound it joins the group before."""
        if len(self._untaken) < MOST_GROUPS:
            self._untaken.append((end, received_unix_ns))
        else:
            self._untaken[-1] = end, self._untaken[-1][1]

    def _append(self, waiting: _PendingAppend) -> Exception | None:
        try:
            self._log.append(KIND_OF_SIGNAL[waiting.signal], waiting.payload, waiting.received_unix_ns)
        except Full as full:
            return self._refuse_full(full)
        except OSError as error:
            return self._fail(error)
        return None

    def _refuse_full(self, full: Full) -> Exception:
        if isinstance(full, NoDescriptors):
            self.stats.refused_unavailable += 1
            return ReceiverUnavailable(f"the journal has no descriptor: {full}", self._retry_delay_s)
        self.stats.refused_full += 1
        return Retryable(f"journal full: {full}", self._retry_delay_s)

    def _fail(self, error: OSError) -> Exception:
        if not self._broken:
            self._folder_gone = isinstance(error, FolderGoneError)
            what = f"the journal is gone: {error.filename}: " if self._folder_gone else "the journal's disk failed: "
            self._broken = what + (error.strerror or str(error))
            _LOG.error("%s; the collector accepts nothing more until a restart", self._broken)
        return self._unavailable()

    def _unavailable(self) -> Exception:
        self.stats.refused_unavailable += 1
        return ReceiverUnavailable(self._broken, self._retry_delay_s)

    def _drop(self, offset: int) -> None:
        try:
            self.stats.released_bytes += self._log.drop_before(offset)
        except OSError as error:
            self.stats.release_failures += 1
            if not self._release_failing:
                _LOG.warning("removing a journal segment failed, the collector retries at every release: %s", error)
            self._release_failing = True
        else:
            self._release_failing = False

    def _take(self, position: int, until: int) -> tuple[list[Stored], int]:
        """Read some records in the reading thread, and return where to continue.

        Records come in batches, so that the loop is not entered for each.
        """
        batch: list[Stored] = []
        size = 0
        with contextlib.closing(self._log.read(position, until)) as records:
            for record in records:
                batch.append(record)
                size += len(record.payload)
                if size >= _READ_AHEAD_BYTES:
                    return batch, record.next_offset
        return batch, until  # also moves past an end without a record

    def _close(self) -> None:
        self._writer.shutdown(wait=True)
        self._log.close()  # followers can go on: they open the files by name

    def _end_reading(self) -> None:
        if self._stopped and not self._followers:
            self._reader.shutdown(wait=False)


def _report(damage: Damage) -> None:
    _LOG.error("journal damaged: %d bytes from offset %d hold no record", damage.next_offset - damage.offset, damage.offset)
