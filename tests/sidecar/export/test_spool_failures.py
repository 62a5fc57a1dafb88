"""The spool on a failing disk: evidence still arrives in order and once.

When the disk works again, the spool returns to it.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.failing_files import KINDS, NAMES, FailingFiles
from handrail.otlp.signals import Signal
from handrail.wal.log import Full
from handrail_sidecar.export.spool import READ_TRIES, Spool

MIB = 1 << 20


def put(spool: Spool, *numbers: int, size: int = 8) -> None:
    for number in numbers:
        spool.put(Signal.TRACES, number.to_bytes(8, "big") * (size // 8), number)


def take(spool: Spool) -> int | None:
    """Take the next batch and acknowledge it."""
    batch = spool.first()
    if batch is None:
        return None
    spool.acknowledge(batch.next_offset)
    return batch.at_unix_ns


def drained(spool: Spool) -> list[int]:
    found = []
    while (number := take(spool)) is not None:
        found.append(number)
    return found


def reopened(files: FailingFiles) -> Spool:
    """Return what the next process finds."""
    return Spool("spool", MIB, files=files)


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
@pytest.mark.parametrize("operation", ["write", "truncate", "open_append", "rename", "unlink", "is_at"])
def test_whatever_fails_evidence_goes_on_in_order_and_back_to_the_disk(operation: str, code: int) -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    put(spool, 0, 1)
    files.failing = {operation: code}
    found = list[int | None]()
    for number in range(2, 12):
        put(spool, number, size=64_000)  # a segment holds two of these
        if operation != "is_at":  # it is also checked before a read
            found.append(take(spool))
    if (operation, code) != ("unlink", errno.ENOENT):  # a missing file need not be removed
        assert spool.errors > 0
        assert spool.trouble
        assert not spool.repair()
    files.failing = {}
    while (left := take(spool)) is not None:
        found.append(left)
    assert spool.repair()
    assert (spool.trouble, spool.held_bytes, spool.waiting_bytes) == ("", 0, 0)
    put(spool, 12, 13)
    spool.close()
    following = reopened(files)
    assert [*found, *drained(following)] == list(range(14))


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
def test_half_a_batch_that_cannot_be_cut_off_is_cut_off_later(code: int) -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    put(spool, 0)
    files.failing = {"write": code, "truncate": code}
    put(spool, 1, 2)
    assert not spool.repair()
    files.failing = {}
    assert spool.repair()
    put(spool, 3)
    spool.close()
    assert drained(reopened(files)) == [0, 1, 2, 3]


def test_a_full_disk_smaller_than_a_segment_frees_its_own_file_and_never_stops() -> None:
    files = FailingFiles(capacity=50_000)  # a segment has 131,072
    spool = Spool("spool", MIB, files=files)
    for number in range(100):
        put(spool, number, size=8_000)
        assert take(spool) == number
    assert (spool.trouble, spool.errors) == ("", 0)
    assert spool.held_bytes == 0


def test_a_full_disk_recovers_as_soon_as_there_is_room() -> None:
    files = FailingFiles(capacity=50_000)
    spool = Spool("spool", MIB, files=files)
    put(spool, *range(10), size=8_000)
    assert spool.trouble == "No space left on device"
    assert spool.held_bytes > 0
    assert not spool.repair()
    assert [take(spool) for _ in range(8)] == list(range(8))
    assert spool.repair()
    assert spool.trouble == ""
    assert drained(spool) == [8, 9]


def test_a_disk_that_others_filled_takes_batches_again_when_they_leave() -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    files.failing = {"write": errno.ENOSPC}
    put(spool, 0, 1)
    assert not spool.repair()
    files.failing = {}
    assert spool.repair()
    assert spool.held_bytes == 0
    spool.close()
    assert drained(reopened(files)) == [0, 1]


def test_memory_is_bounded_and_the_newest_is_refused() -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    files.failing = {"write": errno.EIO}
    with pytest.raises(Full, match="held in memory"):
        put(spool, *range(1000), size=8_000)
    assert MIB - 8_028 < spool.held_bytes <= MIB
    found = drained(spool)
    assert found == list(range(len(found)))


def test_the_disk_at_its_own_bound_is_no_failing_disk() -> None:
    spool = Spool("spool", MIB, files=FailingFiles())
    with pytest.raises(Full, match="bytes used"):
        put(spool, *range(1000), size=8_000)
    assert (spool.trouble, spool.errors, spool.held_bytes) == ("", 0, 0)


def test_what_is_being_sent_while_it_moves_to_the_disk_is_acknowledged_there() -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    files.failing = {"write": errno.EIO}
    put(spool, 0, 1)
    sending = spool.first()
    assert sending is not None
    files.failing = {}
    assert spool.repair()
    spool.acknowledge(sending.next_offset)
    assert drained(spool) == [1]
    spool.close()
    assert drained(reopened(files)) == []


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_reading_is_tried_again_for_ever(code: int) -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    put(spool, 0, 1)
    files.failing = {"open_read": code}
    for _ in range(3 * READ_TRIES):
        with pytest.raises(OSError, match="open files"):
            spool.first()
    assert spool.trouble
    files.failing = {}
    assert drained(spool) == [0, 1]
    assert (spool.trouble, spool.damaged_bytes) == ("", 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("operation", ["open_read", "read_at"])
def test_a_segment_that_cannot_be_read_is_given_up_and_counted_and_the_rest_goes_on(operation: str, code: int) -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    put(spool, 0, 1, 2, size=64_000)  # two in the first segment
    files.failing = {operation: code}
    for _ in range(READ_TRIES):
        with pytest.raises(OSError, match=r"."):
            spool.first()
    assert spool.damaged_bytes == 2 * 64_028
    files.failing = {}
    assert drained(spool) == [2]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _replace(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()


def _move_away(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def _unlink_newest(folder: Path) -> None:
    max(folder.glob("*.seg")).unlink()


GONE = pytest.mark.parametrize("lose", [_remove, _replace, _move_away, _unlink_newest], ids=lambda lose: lose.__name__[1:])


@GONE
def test_a_folder_deleted_or_replaced_costs_nothing_and_is_made_again(
    lose: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, MIB)
    put(spool, *range(6), size=64_000)  # three segments
    sending = spool.first()
    assert sending is not None
    lose(folder)
    put(spool, 6, 7)
    assert spool.trouble
    assert spool.held_bytes == spool.waiting_bytes
    spool.acknowledge(sending.next_offset)
    assert take(spool) == 1
    assert spool.repair()
    assert (spool.trouble, spool.held_bytes) == ("", 0)
    put(spool, 8)
    assert take(spool) == 2
    spool.close()
    spool = Spool(folder, MIB)
    assert drained(spool) == [3, 4, 5, 6, 7, 8]
    spool.close()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"spool {folder}: [Errno 2] deleted or replaced while in use: {str(_gone(lose, folder))!r}; "
        f"the sidecar keeps evidence in memory, at most {MIB} bytes, until the disk accepts it"
    ]


def _gone(lose: Callable[[Path], None], folder: Path) -> Path:
    return folder / f"{4 * 64_028:020d}.seg" if lose is _unlink_newest else folder


@GONE
def test_a_folder_lost_while_nothing_came_is_noticed_by_the_sender(lose: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, MIB)
    put(spool, 0, 1)
    lose(folder)
    assert drained(spool) == [0, 1]
    spool.close()


def test_a_moved_folder_that_comes_back_sends_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, MIB)
    put(spool, 0, 1)
    folder.rename(tmp_path / "away")
    put(spool, 2)
    (tmp_path / "away").rename(folder)
    assert spool.repair()
    assert drained(spool) == [0, 1, 2]
    spool.close()


def test_an_episode_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    files = FailingFiles()
    spool = Spool("spool", MIB, files=files)
    for _ in range(2):
        files.failing = {"write": errno.EROFS}
        put(spool, *range(5))
        for _ in range(5):
            spool.repair()
        files.failing = {}
        assert spool.repair()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"] * 2
    assert "Read-only file system; the sidecar keeps evidence in memory" in caplog.text
    assert "the disk accepts batches again" in caplog.text


def test_dropped_segments_give_their_descriptors_and_bytes_back(tmp_path: Path) -> None:
    spool = Spool(tmp_path, MIB)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        put(spool, number, size=64_000)
        assert take(spool) == number
    assert len(os.listdir("/proc/self/fd")) <= before
    spool.close()


def test_any_order_of_failures_delivers_each_batch_once_and_in_order() -> None:
    for seed in range(100):
        _fail_in_any_order(seed)


@pytest.mark.eval
def test_any_order_of_failures_of_many_delivers_each_batch_once_and_in_order() -> None:
    for seed in range(100, 1000):
        _fail_in_any_order(seed)


def _fail_in_any_order(seed: int) -> None:
    """Put, send and acknowledge while operations fail and work again.

    ``seed`` draws all of it.
    """
    draw = random.Random(seed)
    files = FailingFiles(capacity=draw.choice([None, 60_000, 200_000]))
    spool = Spool("spool", MIB, files=files)
    accepted, found, sending = list[int](), list[int](), None
    for number in range(300):
        act = draw.random()
        if act < 0.4:
            try:
                put(spool, number, size=8 * draw.choice([1, 500, 3000]))
            except Full:
                continue
            accepted.append(number)
        elif act < 0.8:
            if sending is not None:
                spool.acknowledge(sending.next_offset)
                found.append(sending.at_unix_ns)
            sending = spool.first()
        elif act < 0.9:
            operation = draw.choice(["write", "truncate", "open_append", "rename", "unlink", "is_at"])
            if operation != "is_at" or sending is None:
                files.failing[operation] = draw.choice(KINDS)
        elif act < 0.95:
            files.failing.clear()
        else:
            spool.repair()
        if files.failing.get("is_at"):
            files.failing.pop("is_at")
    files.failing.clear()
    if sending is not None:
        spool.acknowledge(sending.next_offset)
        found.append(sending.at_unix_ns)
    spool.repair()
    held = [batch.at_unix_ns for batch in spool.held()]
    if draw.random() < 0.5:
        spool.close()
        files.capacity = None
        left = drained(reopened(files))
        # an acknowledgement that could not be written means a repeat; what memory held dies with the process
        again = [number for number in left if number in found]
        assert [*found, *(number for number in left if number not in found), *held] == accepted
        assert again == sorted(again)
    else:
        assert [*found, *drained(spool)] == accepted
