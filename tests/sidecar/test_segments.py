"""The segmented log keeps everything synced after any crash.

It reports what is missing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from doubles.crash_files import CrashFiles, PowerLost
from handrail.wal.filesystem import Filesystem, MemoryFiles, OsFiles
from handrail.wal.log import Damage, Full, LogLimits, SegmentLog, Stored
from handrail.wal.segment_file import HEADER_BYTES

SMALL = LogLimits(max_bytes=2000, segment_bytes=200, max_record_bytes=120)


@pytest.fixture(params=["os", "memory"])
def files(request: pytest.FixtureRequest) -> Filesystem:
    return OsFiles() if request.param == "os" else MemoryFiles()


@pytest.fixture
def log(tmp_path: Path, files: Filesystem) -> Iterator[SegmentLog]:
    log = SegmentLog(tmp_path / "log", SMALL, files=files)
    yield log
    log.close()


def test_records_come_back_in_order_with_their_offsets(log: SegmentLog) -> None:
    offsets = [log.append(number % 256, bytes([number]) * number, 1000 + number) for number in range(40)]
    records = list(log.read(0))
    assert [(r.offset, r.kind, r.at_unix_ns, r.payload) for r in records] == [
        (offset, number, 1000 + number, bytes([number]) * number) for number, offset in enumerate(offsets)
    ]
    assert [r.next_offset for r in records] == [*offsets[1:], log.end]


def test_read_between_two_offsets(log: SegmentLog) -> None:
    offsets = [log.append(1, b"x" * 50, 0) for _ in range(10)]
    assert [r.offset for r in log.read(offsets[3], offsets[7])] == offsets[3:7]


def test_segments_are_named_by_their_first_offset(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, SMALL)
    for _ in range(4):
        log.append(1, b"x" * 72, 0)
    log.close()
    assert sorted(os.listdir(tmp_path)) == [f"{first:020d}.seg" for first in (0, 200)]


def test_reopening_goes_on_where_it_ended(tmp_path: Path, files: Filesystem) -> None:
    log = SegmentLog(tmp_path, SMALL, files=files)
    first = [log.append(1, b"a" * 60, 1) for _ in range(5)]
    log.close()
    log = SegmentLog(tmp_path, SMALL, files=files)
    second = log.append(2, b"b", 2)
    assert [r.offset for r in log.read(0)] == [*first, second]
    assert log.recovery.torn_bytes == 0
    log.close()


def test_dropping_frees_whole_segments_and_never_the_open_one(log: SegmentLog) -> None:
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(6)]
    assert log.drop_before(offsets[3]) == 200
    assert [r.offset for r in log.read(0)] == offsets[2:]
    log.drop_before(log.end)
    assert [r.offset for r in log.read(0)] == offsets[4:]
    assert log.begin == offsets[4]
    assert log.size() == 200


def test_a_reader_in_a_dropped_segment_ends_there(log: SegmentLog) -> None:
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(6)]
    reader = log.read(0)
    assert next(reader).offset == offsets[0]
    log.drop_before(offsets[4])
    assert [r.offset for r in reader] == [offsets[1], *offsets[4:]]


def test_full_refuses_and_keeps_what_is_there(log: SegmentLog) -> None:
    for _ in range(20):
        log.append(1, b"x" * 72, 0)
    with pytest.raises(Full):
        log.append(1, b"", 0)
    assert len(list(log.read(0))) == 20
    log.drop_before(400)
    log.append(1, b"x", 0)


def test_a_record_above_the_limit_is_refused(log: SegmentLog) -> None:
    with pytest.raises(ValueError, match="above the limit of 120"):
        log.append(1, b"x" * 121, 0)


def test_a_lowered_limit_keeps_what_is_stored(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, SMALL)
    log.append(1, b"x" * 120, 0)
    log.close()
    log = SegmentLog(tmp_path, LogLimits(max_bytes=2000, segment_bytes=200, max_record_bytes=50))
    assert [r.payload for r in log.read(0)] == [b"x" * 120]
    log.close()


def test_descriptors_do_not_leak(tmp_path: Path) -> None:
    def round_trip() -> None:
        log = SegmentLog(tmp_path, SMALL)
        for _ in range(6):
            log.append(1, b"x" * 100, 0)
        next(log.read(0))
        log.drop_before(log.sync())
        log.close()
        log.close()

    round_trip()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        round_trip()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_segment_takes_one_record_larger_than_itself(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, LogLimits(max_bytes=5000, segment_bytes=100, max_record_bytes=1000))
    offsets = [log.append(1, b"x" * size, 0) for size in (10, 900, 10)]
    assert [r.offset for r in log.read(0)] == offsets
    log.close()


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (LogLimits(max_bytes=300, segment_bytes=200, max_record_bytes=100), "max_bytes: must hold"),
        (LogLimits(max_bytes=300, segment_bytes=0, max_record_bytes=100), "segment_bytes: must be above 0"),
    ],
)
def test_limits_that_cannot_work_are_refused(tmp_path: Path, limits: LogLimits, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SegmentLog(tmp_path, limits)


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, SMALL)
    with pytest.raises(BlockingIOError, match="another process"):
        SegmentLog(tmp_path, SMALL)
    log.close()
    SegmentLog(tmp_path, SMALL).close()


def test_floor_keeps_offsets_from_being_used_twice(tmp_path: Path, files: Filesystem) -> None:
    log = SegmentLog(tmp_path, SMALL, files=files)
    log.append(1, b"old", 0)
    log.close()
    log = SegmentLog(tmp_path, SMALL, files=files, floor=5000)
    assert log.append(1, b"new", 0) == 5000
    assert [r.payload for r in log.read(5000)] == [b"new"]
    assert log.size() == 2 * (HEADER_BYTES + 3)
    log.close()


@pytest.mark.parametrize("cut", range(1, HEADER_BYTES + 10))
def test_a_torn_tail_is_cut_off_at_any_byte(tmp_path: Path, cut: int) -> None:
    log = SegmentLog(tmp_path, SMALL)
    kept = log.append(1, b"whole", 0)
    torn = log.append(1, b"0123456789", 0)
    log.close()
    path = tmp_path / f"{0:020d}.seg"
    os.truncate(path, path.stat().st_size - cut)
    log = SegmentLog(tmp_path, SMALL)
    assert log.recovery.torn_bytes == HEADER_BYTES + 10 - cut
    assert [r.offset for r in log.read(0)] == [kept]
    assert log.append(2, b"again", 0) == torn
    assert [r.payload for r in log.read(0)] == [b"whole", b"again"]
    log.close()


@pytest.mark.parametrize("byte", range(HEADER_BYTES + 20))
def test_rot_in_the_middle_costs_one_record_and_is_reported(byte: int) -> None:
    files, damage = CrashFiles(), list[Damage]()
    log = SegmentLog("log", SMALL, files=files, on_damage=damage.append)
    offsets = [log.append(1, b"HRJ1" * 5, number) for number in range(8)]
    files.damage(f"log/{0:020d}.seg", offsets[1] + byte)
    assert [r.offset for r in log.read(0)] == [offsets[0], *offsets[2:]]
    assert damage == [Damage(offsets[1], offsets[2])]
    assert log.damaged_bytes == 48


def test_rot_in_the_newest_segment_does_not_cut_what_follows_it() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    offsets = [log.append(1, b"x" * 20, number) for number in range(4)]
    log.close()
    files.damage(f"log/{0:020d}.seg", offsets[1], 30)
    log = SegmentLog("log", SMALL, files=files)
    assert log.recovery.torn_bytes == 0
    assert [r.offset for r in log.read(0)] == [offsets[0], *offsets[2:]]


def test_a_payload_that_quotes_a_record_is_no_record() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"quoted", 7)
    quoted = log._files.read_at(log._fd, 34, 0)
    log.append(1, b"....." + quoted, 8)
    after = log.append(1, b"after", 9)
    files.damage(f"log/{0:020d}.seg", 34)
    assert [r.offset for r in log.read(0)] == [0, after]


def test_a_lost_tail_of_an_older_segment_is_reported() -> None:
    files, damage = CrashFiles(), list[Damage]()
    log = SegmentLog("log", SMALL, files=files, on_damage=damage.append)
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(4)]
    files.truncate(files.open_append(f"log/{0:020d}.seg"), 150)
    assert [r.offset for r in log.read(0)] == [offsets[0], *offsets[2:]]
    assert damage == [Damage(100, 200)]


def test_short_writes_are_completed() -> None:
    files = CrashFiles()
    files.short_writes = True
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"x" * 50, 0)
    log.append(1, b"y" * 50, 0)
    assert [r.payload for r in log.read(0)] == [b"x" * 50, b"y" * 50]


@pytest.mark.parametrize(
    ("code", "raised"), [(errno.ENOSPC, Full), (errno.EDQUOT, Full), (errno.EIO, OSError)], ids=["space", "quota", "broken"]
)
@pytest.mark.parametrize("short", [False, True], ids=["at-once", "half-way"])
def test_a_failed_write_leaves_no_half_record(code: int, raised: type[Exception], short: bool) -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"first", 0)
    files.short_writes = short
    files.refuse["write"] = OSError(code, "refused")
    with pytest.raises(raised):
        log.append(1, b"second", 0)
    log.append(1, b"third", 0)
    log.close()
    log = SegmentLog("log", SMALL, files=files)
    assert log.recovery.torn_bytes == 0
    assert [r.payload for r in log.read(0)] == [b"first", b"third"]


def test_where_half_a_record_cannot_be_cut_off_the_log_stops() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"first", 0)
    files.short_writes = True
    files.refuse |= {"write": OSError(errno.EIO, "w"), "truncate": OSError(errno.EIO, "t")}
    for _ in range(2):
        with pytest.raises(OSError, match=r"w|t"):
            log.append(1, b"second", 0)
    assert [r.payload for r in log.read(0)] == [b"first"]


@pytest.mark.parametrize("operation", ["fdatasync", "fsync_dir"])
def test_after_a_failed_sync_nothing_more_is_taken(operation: str) -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"lost?", 0)
    files.refuse[operation] = OSError(errno.EIO, "gone")
    with pytest.raises(OSError, match="gone"):
        log.sync()
    assert log.synced == 0
    with pytest.raises(OSError, match="gone"):
        log.append(1, b"more", 0)
    with pytest.raises(OSError, match="gone"):
        log.sync()  # would succeed: the kernel forgets what it could not write
    assert log.synced == 0


@pytest.mark.parametrize("operation", ["fdatasync", "fsync_dir"])
@pytest.mark.parametrize("rolled", [0, 1, 3])
def test_where_the_disk_ends_at_a_sync_what_was_not_acknowledged_is_taken_back(operation: str, rolled: int) -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.sync()
    log.append(1, b"kept", 0)
    end = log.sync()
    for number in range(1 + rolled):
        log.append(1, bytes([number]) * 120, 0)
    if operation == "fsync_dir" and not rolled:
        log._names_unsynced = True
    files.refuse[operation] = OSError(errno.ENOSPC, "no space")
    with pytest.raises(Full, match="no space"):
        log.sync()
    assert (log.end, log.synced, log.size()) == (end, end, end)
    log.append(1, b"after", 0)
    log.sync()
    log.close()
    files.crash(lambda most: 0)
    log = SegmentLog("log", SMALL, files=files)
    assert [r.payload for r in log.read(0)] == [b"kept", b"after"]
    assert log.damaged_bytes == 0


def test_the_first_sync_takes_nothing_back_for_it_may_have_been_acknowledged() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"acknowledged", 0)
    log.sync()
    log.close()
    log = SegmentLog("log", SMALL, files=files)
    files.refuse["fdatasync"] = OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no space"):
        log.sync()
    assert [r.payload for r in log.read(0)] == [b"acknowledged"]


def test_a_sync_after_reopening_covers_what_a_dead_process_left_unsynced() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(4)]
    log.close()
    SegmentLog("log", SMALL, files=files).sync()
    files.crash(lambda most: 0)
    assert [r.offset for r in SegmentLog("log", SMALL, files=files).read(0)] == offsets


def test_no_room_for_a_new_segment_is_full() -> None:
    files = CrashFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"x" * 120, 0)
    files.refuse["open_append"] = OSError(errno.ENOSPC, "no inode")
    with pytest.raises(Full):
        log.append(1, b"x" * 120, 0)
    log.append(1, b"x" * 120, 0)
    assert len(list(log.read(0))) == 2


def test_no_room_for_the_first_segment_is_a_disk_that_fails_for_nothing_can_be_refused_yet() -> None:
    files = CrashFiles()
    files.refuse["open_append"] = OSError(errno.ENOSPC, "no inode")
    with pytest.raises(OSError, match="no inode"):
        SegmentLog("log", SMALL, files=files)
    SegmentLog("log", SMALL, files=files).close()


@pytest.mark.parametrize("keep", [0, 1], ids=["loses-all-it-may", "keeps-all-it-may"])
def test_power_may_fail_before_any_operation_even_of_the_recovery(keep: int) -> None:
    def choose(most: int) -> int:
        return keep * most

    def work(files: CrashFiles, synced: list[int], dropped: list[int]) -> None:
        log = SegmentLog("log", SMALL, files=files, floor=max(dropped, default=0))
        for number in range(12):
            log.append(1, bytes([number]) * 90, number)
            if number % 3 == 2:
                synced.append(log.sync())
            if number % 6 == 5:
                dropped.append(synced[-2])
                log.drop_before(synced[-2])
        log.close()

    crashes = 0
    while True:
        files, synced, dropped = CrashFiles(), list[int](), list[int]()
        files.operations_left = crashes
        try:
            work(files, synced, dropped)
        except PowerLost:
            files.crash(choose)
        else:
            break
        for again in range(6):
            files.operations_left = again
            try:
                SegmentLog("log", SMALL, files=files).close()
            except PowerLost:
                files.crash(choose)
        files.operations_left = None
        log = SegmentLog("log", SMALL, files=files)
        found = [r.offset for r in log.read(0)]
        assert found == sorted(found)
        must = range(max(dropped, default=0), max(synced, default=0), HEADER_BYTES + 90)
        assert set(must) <= set(found), crashes
        crashes += 1
    assert crashes > 20


class CrashMachine(RuleBasedStateMachine):
    """Run any sequence of appends, syncs, drops, restarts and power losses.

    The log keeps exactly the synced records, and invents none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files = CrashFiles()
        self.records: dict[int, Stored] = {}  # every record that may be read back, by offset
        self.synced_to = 0
        self.dropped_to = 0

    @initialize()
    def open(self) -> None:
        self.log = SegmentLog("log", SMALL, files=self.files, floor=self.dropped_to)

    @rule(payload=st.integers(0, SMALL.max_record_bytes).map(lambda size: bytes(range(size))), kind=st.integers(0, 255))
    def append(self, payload: bytes, kind: int) -> None:
        try:
            offset = self.log.append(kind, payload, len(self.records))
        except Full:
            assert self.log.size() + HEADER_BYTES + len(payload) > SMALL.max_bytes
            return
        self.records[offset] = Stored(offset, self.log.end, kind, len(self.records), payload)

    @rule()
    def sync(self) -> None:
        self.synced_to = self.log.sync()
        assert self.synced_to == self.log.end

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        # A reader sees only synced records, so it never drops others.
        candidates = [r.next_offset for r in self.records.values() if r.next_offset <= self.synced_to]
        if candidates:
            offset = data.draw(st.sampled_from(candidates))
            self.log.drop_before(offset)
            self.dropped_to = max(self.dropped_to, offset)

    @rule()
    def read(self) -> None:
        found = list(self.log.read(self.dropped_to))
        assert found == [r for offset, r in sorted(self.records.items()) if offset >= self.dropped_to]
        assert self.log.size() <= SMALL.max_bytes

    @rule()
    def restart(self) -> None:
        """Restart the process, not the machine: no appended record is lost."""
        self.log.close()
        self.open()
        assert self.log.recovery.torn_bytes == 0
        self.read()

    @rule(data=st.data())
    def lose_power(self, data: st.DataObject) -> None:
        before = self.records
        self.files.crash(lambda most: data.draw(st.integers(0, most)))
        self.open()
        found = {r.offset: r for r in self.log.read(self.dropped_to)}
        for offset, record in found.items():
            assert before[offset] == record
        lost = [r for offset, r in before.items() if self.dropped_to <= offset and offset not in found]
        assert all(r.offset >= self.synced_to for r in lost)
        self.records = found
        self.synced_to = min(self.synced_to, self.log.end)


CrashMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_crashes = CrashMachine.TestCase
