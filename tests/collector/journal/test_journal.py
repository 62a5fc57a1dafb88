"""The journal: acknowledged entries are on disk, and a full journal refuses.

One follower sees every entry once and in order.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from doubles.crash_files import CrashFiles
from doubles.failing_files import KINDS, NAMES, FailingFiles
from handrail.otlp.signals import ReceiverUnavailable, Rejected, Retryable, Signal
from handrail.wal.log import Damage, LogLimits, SegmentLog
from handrail_collector.journal import journal as journal_module
from handrail_collector.journal.journal import Entry, Journal, JournalSettings

SMALL = LogLimits(max_bytes=4000, segment_bytes=400, max_record_bytes=300)


def open_journal(files: CrashFiles, **options: Any) -> Journal:
    return Journal(SegmentLog("journal", SMALL, files=files), now_unix_ns=lambda: 42, **options)


async def entries(journal: Journal, count: int, from_offset: int = 0) -> list[Entry]:
    """Return the first ``count`` entries from an offset on."""
    found: list[Entry] = []
    async for entry in journal.follow(from_offset):
        found.append(entry)
        if len(found) == count:
            break
    return found


async def within(awaitable: Awaitable[object]) -> object:
    return await asyncio.wait_for(awaitable, 60)


@pytest.fixture
def disk() -> CrashFiles:
    return CrashFiles()


async def test_acknowledged_is_durable(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    await journal.start()
    for number in range(10):
        await journal.consume(Signal.TRACES, b"%d" % number * 100)
    disk.crash(lambda most: 0)
    journal = open_journal(disk)
    await journal.start()
    assert [e.payload for e in await entries(journal, 10)] == [b"%d" % number * 100 for number in range(10)]


async def test_entries_say_what_they_are(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    for signal in Signal:
        await journal.consume(signal, signal.value.encode())
    first, second, third = await entries(journal, 3)
    assert [(e.signal, e.payload) for e in (first, second, third)] == [(s, s.value.encode()) for s in Signal]
    assert (first.offset, first.next_offset, first.received_unix_ns) == (0, second.offset, 42)
    assert (await entries(journal, 1, third.offset)) == [third]
    await journal.shutdown()


async def test_all_that_wait_share_one_sync(disk: CrashFiles) -> None:
    gate = Gate()
    journal = Journal(SegmentLog("journal", files=gate))
    first = asyncio.create_task(journal.consume(Signal.TRACES, b"first"))
    await within(asyncio.to_thread(gate.reached.wait))
    others = [asyncio.create_task(journal.consume(Signal.TRACES, b"%d" % n)) for n in range(50)]
    await asyncio.sleep(0)  # each of them runs up to its wait
    assert not first.done()
    gate.open.set()
    await within(asyncio.gather(first, *others))
    assert journal.stats.syncs == 2
    assert journal.stats.appended_records == 51
    await journal.shutdown()


async def test_what_waits_for_the_disk_is_bounded(disk: CrashFiles) -> None:
    gate = Gate()
    journal = Journal(SegmentLog("journal", files=gate), max_pending_bytes=100, retry_delay_s=7.0)
    waiting = asyncio.create_task(journal.consume(Signal.TRACES, b"x" * 90))
    await within(asyncio.to_thread(gate.reached.wait))
    with pytest.raises(Retryable, match="behind") as refusal:
        await journal.consume(Signal.TRACES, b"x" * 20)
    assert refusal.value.delay_s == 7.0
    gate.open.set()
    await within(waiting)
    await journal.consume(Signal.TRACES, b"x" * 20)
    assert journal.stats.refused_busy == 1
    await journal.shutdown()


async def test_full_is_refused_until_something_is_released(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    for _ in range(12):
        await journal.consume(Signal.TRACES, b"x" * 300)
    with pytest.raises(Retryable, match="journal full") as refusal:
        await journal.consume(Signal.TRACES, b"x" * 300)
    assert not isinstance(refusal.value, ReceiverUnavailable)
    assert journal.stats.refused_full == 1
    kept = await entries(journal, 5)
    journal.release(kept[-1].next_offset)
    await journal.consume(Signal.TRACES, b"x" * 300)
    assert journal.begin == kept[-1].next_offset
    assert journal.stats.released_bytes == 5 * 328
    await journal.shutdown()


async def test_a_request_that_can_never_fit_is_rejected(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    with pytest.raises(Rejected, match="takes 300"):
        await journal.consume(Signal.TRACES, b"x" * 301)
    await journal.shutdown()


@pytest.mark.parametrize("operation", ["write", "fdatasync", "fsync_dir"])
async def test_a_failed_disk_acknowledges_nothing_and_says_so(disk: CrashFiles, operation: str) -> None:
    journal = open_journal(disk)
    disk.refuse[operation] = OSError(errno.EIO, "input/output error")
    for _ in range(2):
        with pytest.raises(ReceiverUnavailable, match="disk failed: input/output error"):
            await journal.consume(Signal.TRACES, b"x")
    assert not journal.healthy
    assert journal.end == 0
    await journal.shutdown()


async def test_the_disk_s_own_end_is_full_not_broken(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    disk.refuse["write"] = OSError(errno.ENOSPC, "no space")
    with pytest.raises(Retryable, match="journal full"):
        await journal.consume(Signal.TRACES, b"x")
    await journal.consume(Signal.TRACES, b"y")
    assert journal.healthy
    assert [e.payload for e in await entries(journal, 1)] == [b"y"]
    await journal.shutdown()


async def test_a_disk_that_ends_at_the_sync_refuses_the_group_and_goes_on_when_there_is_space(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    await journal.start()
    await journal.consume(Signal.TRACES, b"acknowledged")
    disk.refuse["fdatasync"] = OSError(errno.ENOSPC, "no space")
    refused = await asyncio.gather(*(journal.consume(Signal.TRACES, b"x%d" % n) for n in range(3)), return_exceptions=True)
    assert all(isinstance(refusal, Retryable) and "journal full" in str(refusal) for refusal in refused)
    assert (journal.healthy, journal.stats.refused_full, journal.stats.appended_records) == (True, 3, 1)
    await journal.consume(Signal.TRACES, b"y")
    disk.crash(lambda most: 0)
    journal = open_journal(disk)
    await journal.start()
    assert [e.payload for e in await entries(journal, 2)] == [b"acknowledged", b"y"]
    assert journal.damaged_bytes == 0
    await journal.shutdown()


async def test_a_disk_that_is_full_at_the_start_fails_it(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    disk.refuse["fsync_dir"] = OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no space"):
        await journal.start()
    await journal.shutdown()


async def test_a_follower_waits_for_what_comes(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    reading = asyncio.create_task(entries(journal, 30))
    for number in range(30):
        await journal.consume(Signal.LOGS, b"%d" % number)
    found = await asyncio.wait_for(reading, 60)
    assert [e.payload for e in found] == [b"%d" % number for number in range(30)]
    assert journal.followed_offset == journal.end
    assert journal.followed_unix_ns == 42
    assert journal.lag_bytes == 0
    await journal.shutdown()


async def test_lag_is_what_nobody_has_taken(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    await journal.consume(Signal.LOGS, b"x" * 72)
    await journal.consume(Signal.LOGS, b"y" * 72)
    await entries(journal, 1)
    assert journal.lag_bytes == 100
    await journal.shutdown()


async def test_a_follower_reads_to_the_end_after_a_shutdown_and_ends(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    first, go_on, seen = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def drain() -> None:
        async for entry in journal.follow(0):
            seen.append(entry.payload)
            first.set()
            await go_on.wait()

    following = asyncio.create_task(drain())
    for number in range(5):
        await journal.consume(Signal.LOGS, b"%d" % number)
    await within(first.wait())
    await journal.shutdown()
    go_on.set()
    await within(following)
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_waiting_follower_ends_at_shutdown(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    following = asyncio.create_task(entries(journal, 1))
    await asyncio.sleep(0)
    await journal.shutdown()
    assert await asyncio.wait_for(following, 60) == []


async def test_shutdown_finishes_what_waits_and_works_twice(disk: CrashFiles) -> None:
    gate = Gate()
    journal = Journal(SegmentLog("journal", files=gate))
    waiting = asyncio.create_task(journal.consume(Signal.TRACES, b"x"))
    await within(asyncio.to_thread(gate.reached.wait))
    stopping = asyncio.create_task(journal.shutdown())
    gate.open.set()
    await within(asyncio.gather(waiting, stopping))
    await journal.shutdown()
    with pytest.raises(ReceiverUnavailable, match="stopping"):
        await journal.consume(Signal.TRACES, b"x")
    journal.release(1)


async def test_a_sender_that_leaves_does_not_harm_the_others(disk: CrashFiles) -> None:
    gate = Gate()
    journal = Journal(SegmentLog("journal", files=gate))
    leaving = asyncio.create_task(journal.consume(Signal.TRACES, b"leaves"))
    await within(asyncio.to_thread(gate.reached.wait))
    staying = asyncio.create_task(journal.consume(Signal.TRACES, b"stays"))
    await asyncio.sleep(0)
    leaving.cancel()
    gate.open.set()
    await within(staying)
    assert [e.payload for e in await entries(journal, 2)] == [b"leaves", b"stays"]
    await journal.shutdown()


async def test_damage_is_passed_over_and_counted(disk: CrashFiles) -> None:
    journal = open_journal(disk)
    for number in range(4):
        await journal.consume(Signal.TRACES, b"%d" % number * 72)
    disk.damage(f"journal/{0:020d}.seg", 150)
    found = await entries(journal, 3)
    assert [e.payload[:1] for e in found] == [b"0", b"2", b"3"]
    assert journal.damaged_bytes == 100
    await journal.shutdown()


async def test_a_damaged_end_does_not_stop_the_follower(disk: CrashFiles) -> None:
    loop, noticed = asyncio.get_running_loop(), asyncio.Event()

    def notice(damage: Damage) -> None:
        loop.call_soon_threadsafe(noticed.set)

    journal = Journal(SegmentLog("journal", SMALL, files=disk, on_damage=notice))
    await journal.consume(Signal.TRACES, b"x" * 72)
    disk.damage(f"journal/{0:020d}.seg", 50)
    reading = asyncio.create_task(entries(journal, 1))
    await within(noticed.wait())
    await journal.consume(Signal.TRACES, b"y")
    assert [e.payload for e in await asyncio.wait_for(reading, 60)] == [b"y"]
    assert journal.damaged_bytes == 100
    await journal.shutdown()


async def test_kinds_of_a_later_version_are_passed_over_and_counted(disk: CrashFiles) -> None:
    log = SegmentLog("journal", SMALL, files=disk)
    log.append(99, b"?", 0)
    journal = Journal(log)
    await journal.start()
    await journal.consume(Signal.TRACES, b"x")
    assert [e.payload for e in await entries(journal, 1)] == [b"x"]
    assert journal.stats.unknown_records == 1
    await journal.shutdown()


async def test_on_a_real_disk_a_restart_goes_on(tmp_path: Path) -> None:
    settings = JournalSettings(folder=tmp_path / "journal", max_bytes=16 << 20)
    payloads = [bytes([number]) * 100_000 for number in range(60)]
    journal = Journal(settings.open_log())
    await journal.start()
    await asyncio.gather(*(journal.consume(Signal.TRACES, payload) for payload in payloads))
    half = (await entries(journal, 30))[-1].next_offset
    await journal.shutdown()
    journal = Journal(settings.open_log(floor=half))
    await journal.start()
    assert [e.payload for e in await entries(journal, 30, half)] == payloads[30:]
    assert journal.torn_bytes == 0
    await journal.shutdown()


class Gate(CrashFiles):
    """A disk whose first sync blocks until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.open = threading.Event()

    def fdatasync(self, fd: int) -> None:
        self.reached.set()
        assert self.open.wait(60)
        super().fdatasync(fd)


async def test_how_old_the_oldest_untaken_entry_is_whoever_looks_when(tmp_path: Path) -> None:
    now = 1_700_000_000 * 10**9
    journal = Journal(JournalSettings(folder=tmp_path).open_log(), now_unix_ns=lambda: now)
    await journal.start()
    assert journal.untaken_unix_ns is None
    first = now
    for _ in range(3):
        await journal.consume(Signal.TRACES, b"x")
        now += 10**9
    assert journal.untaken_unix_ns == first
    ages = []
    following = journal.follow(0)
    for _ in range(3):
        await anext(following)
        ages.append(journal.untaken_unix_ns)
    assert ages == [first + 10**9, first + 2 * 10**9, None]
    await journal.consume(Signal.TRACES, b"x")
    assert journal.untaken_unix_ns == now, "an hour of quiet is no lag"
    await following.aclose()
    await journal.shutdown()


async def test_what_an_earlier_process_left_lags_by_its_own_age(tmp_path: Path) -> None:
    first = 1_700_000_000 * 10**9
    times = iter((first, first + 3600 * 10**9))
    journal = Journal(JournalSettings(folder=tmp_path).open_log(), now_unix_ns=lambda: next(times))
    await journal.start()
    for _ in range(2):
        await journal.consume(Signal.TRACES, b"x")
    await journal.shutdown()
    journal = Journal(JournalSettings(folder=tmp_path).open_log())
    await journal.start()
    following = journal.follow(0)
    await anext(following)
    assert journal.untaken_unix_ns == first
    await anext(following)
    assert journal.untaken_unix_ns is None
    await following.aclose()
    await journal.shutdown()


async def test_times_of_receipt_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_GROUPS", 3)
    times = iter(range(5, 15))
    journal = Journal(JournalSettings(folder=tmp_path).open_log(), now_unix_ns=lambda: next(times))
    await journal.start()
    for _ in range(10):
        await journal.consume(Signal.TRACES, b"x")
    assert journal.untaken_unix_ns == 5
    assert len(journal._untaken) == 3
    await journal.shutdown()


class FewDescriptors(CrashFiles):
    """A file system that runs out of descriptors for reading.

    No file can be opened for reading while ``short`` is above 0; each attempt takes 1 off.
    """

    def __init__(self, short: int, code: int) -> None:
        super().__init__()
        self.short = short
        self.code = code

    def open_read(self, path: str) -> int:
        if self.short:
            self.short -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().open_read(path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
async def test_follower_waits_for_descriptors(code: int, caplog: pytest.LogCaptureFixture) -> None:
    files = FewDescriptors(0, code)
    journal = open_journal(files)
    for number in range(3):
        await journal.consume(Signal.TRACES, b"%d" % number)
    files.short = 3
    found = await within(entries(journal, 3))
    assert isinstance(found, list)
    assert [entry.payload for entry in found] == [b"0", b"1", b"2"]
    assert files.short == 0
    assert [record.message for record in caplog.records] == [
        f"reading the journal fails: {os.strerror(code)}; the collector retries every 0.1 s"
    ]
    await journal.shutdown()


async def test_follower_ends_with_another_fault_of_the_files() -> None:
    files = FewDescriptors(0, errno.EIO)
    journal = open_journal(files)
    await journal.consume(Signal.TRACES, b"0")
    files.short = 1
    with pytest.raises(OSError, match="Input/output error"):
        await within(entries(journal, 1))
    await journal.shutdown()


RULES = {errno.ENOSPC: "full", errno.EMFILE: "unavailable", errno.ENFILE: "unavailable"}
"""The journal's answer to each errno, where the failure is not fatal."""


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
@pytest.mark.parametrize("operation", ["write", "fdatasync", "open_append", "fsync_dir"])
async def test_the_rule_for_each_error_of_the_journals_disk(operation: str, code: int) -> None:
    files = FailingFiles()
    journal = Journal(SegmentLog("journal", SMALL, files=files))
    await journal.start()
    await journal.consume(Signal.TRACES, b"kept" * 60)
    files.failing = {operation: code}
    with pytest.raises(Retryable):
        await journal.consume(Signal.TRACES, b"lost" * 60)  # in the next segment
    assert journal.healthy is (code in RULES)
    stats = journal.stats
    assert (stats.refused_full, stats.refused_unavailable) == ((1, 0) if RULES.get(code) == "full" else (0, 1))
    assert not journal.lost
    files.failing = {}
    if journal.healthy:
        await journal.consume(Signal.TRACES, b"next" * 60)
        assert [entry.payload[:4] for entry in await entries(journal, 2)] == [b"kept", b"next"]
    else:
        with pytest.raises(ReceiverUnavailable, match="the journal's disk failed"):
            await journal.consume(Signal.TRACES, b"x")
    await journal.shutdown()


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
async def test_segment_that_cannot_be_removed_is_retried_and_logged_once(code: int, caplog: pytest.LogCaptureFixture) -> None:
    files = FailingFiles()
    journal = Journal(SegmentLog("journal", SMALL, files=files))
    await journal.start()
    for _ in range(6):
        await journal.consume(Signal.TRACES, b"x" * 172)
    files.failing = {"unlink": code}
    for offset in (400, 500, 600):
        journal.release(offset)
    await journal.consume(Signal.TRACES, b"x")  # queued behind them in the writing thread
    failed = code != errno.ENOENT  # a file that is gone need not be removed
    assert journal.stats.release_failures == (3 if failed else 0)
    assert len(caplog.records) == (1 if failed else 0)
    files.failing = {}
    journal.release(900)
    await journal.consume(Signal.TRACES, b"x")
    assert journal.begin == 800
    await journal.shutdown()


async def test_a_journal_whose_folder_is_gone_acknowledges_nothing_and_says_which(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(JournalSettings(folder=folder).open_log())
    await journal.start()
    await journal.consume(Signal.TRACES, b"kept")
    folder.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(ReceiverUnavailable, match="the journal is gone"):
            await journal.consume(Signal.TRACES, b"lost")
    await within(journal.gone())
    assert journal.lost == f"the journal is gone: {folder}: deleted or replaced while in use"
    await journal.shutdown()
