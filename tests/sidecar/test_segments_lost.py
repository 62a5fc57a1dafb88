"""A segmented log whose folder or file is removed.

Also one whose process has no descriptor left.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.failing_files import FailingFiles
from handrail.wal.filesystem import OUT_OF_DESCRIPTORS
from handrail.wal.log import Damage, FolderGoneError, LogLimits, NoDescriptors, SegmentLog

SMALL = LogLimits(max_bytes=2000, segment_bytes=200, max_record_bytes=120)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _remove_with_its_parent(folder: Path) -> None:
    shutil.rmtree(folder.parent)


def _replace(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()


def _replace_by_a_copy(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    shutil.copytree(folder.with_name("away"), folder)


def _replace_by_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way")


def _unlink_newest(folder: Path) -> None:
    max(folder.glob("*.seg")).unlink()


def _rename_newest(folder: Path) -> None:
    newest = max(folder.glob("*.seg"))
    newest.rename(newest.with_suffix(".old"))


LOSSES = (
    *(_remove, _remove_with_its_parent, _replace, _replace_by_a_copy, _replace_by_a_file),
    *(_unlink_newest, _rename_newest),
)


@pytest.mark.parametrize("records", [1, 3], ids=["same-segment", "rolled"])
@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__[1:])
def test_what_is_written_into_no_folder_is_not_synced_and_nothing_is_from_then_on(
    lose: Callable[[Path], None], records: int, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "journal"
    log = SegmentLog(folder, SMALL)
    log.append(1, b"kept", 0)
    synced = log.sync()
    lose(folder)
    with pytest.raises(FolderGoneError, match="deleted or replaced while in use"):
        _append_and_sync(log, records)
    assert log.synced == synced
    with pytest.raises(FolderGoneError):
        log.append(1, b"x", 0)
    log.close()


def _append_and_sync(log: SegmentLog, records: int) -> None:
    for _ in range(records):
        log.append(1, b"x" * 120, 0)  # a new segment may find no folder
    log.sync()


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__[1:])
def test_a_folder_lost_between_two_rolls_of_one_group_is_noticed(lose: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    log = SegmentLog(folder, SMALL)
    log.sync()
    for _ in range(2):
        log.append(1, b"x" * 120, 0)
    lose(folder)
    with pytest.raises(FolderGoneError):
        _append_and_sync(log, 3)
    assert log.synced == 0
    log.close()


def test_a_deleted_older_segment_is_reported_as_damage_and_not_passed_over_in_silence(tmp_path: Path) -> None:
    damage = list[Damage]()
    log = SegmentLog(tmp_path, SMALL, on_damage=damage.append)
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(6)]
    log.sync()
    min(tmp_path.glob("*.seg")).unlink()
    assert [record.offset for record in log.read(0)] == offsets[2:]
    assert damage == [Damage(0, 200)]
    assert log.damaged_bytes == 200
    log.close()


def test_a_segment_that_someone_else_removed_does_not_keep_the_later_ones(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, SMALL)
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(6)]
    min(tmp_path.glob("*.seg")).unlink()
    assert log.drop_before(offsets[4]) == 400
    assert len(list(tmp_path.glob("*.seg"))) == 1
    log.close()


@pytest.mark.parametrize("code", sorted(OUT_OF_DESCRIPTORS))
def test_without_a_descriptor_for_the_next_segment_nothing_is_taken_and_later_it_is(code: int) -> None:
    files = FailingFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"x" * 120, 0)
    log.sync()
    files.failing = {"open_append": code}
    for _ in range(2):
        with pytest.raises(NoDescriptors):
            log.append(1, b"x" * 120, 0)
    files.failing = {}
    log.append(1, b"x" * 120, 0)
    assert log.sync() == log.end
    assert len(list(log.read(0))) == 2


@pytest.mark.parametrize("code", sorted(OUT_OF_DESCRIPTORS))
def test_without_a_descriptor_for_a_new_name_the_group_is_taken_back_and_the_next_one_is_kept(code: int) -> None:
    files = FailingFiles()
    log = SegmentLog("log", SMALL, files=files)
    log.append(1, b"kept", 0)
    end = log.sync()
    for _ in range(3):
        log.append(1, b"x" * 120, 0)
    files.failing = {"fsync_dir": code}
    with pytest.raises(NoDescriptors):
        log.sync()
    assert (log.end, log.synced) == (end, end)
    files.failing = {}
    log.append(1, b"after", 0)
    assert log.sync() == log.end
    assert [record.payload for record in log.read(0)] == [b"kept", b"after"]


def test_begun_anew_it_goes_on_above_with_its_space_back() -> None:
    files = FailingFiles(capacity=400)
    log = SegmentLog("log", SMALL, files=files)
    offsets = [log.append(1, b"x" * 72, 0) for _ in range(4)]
    log.start_anew()
    assert log.size() == 0
    assert log.append(1, b"y" * 72, 0) == offsets[-1] + 100
    assert [record.payload[:1] for record in log.read(0)] == [b"y"]
    log.start_anew()
    log.close()
    assert SegmentLog("log", SMALL, files=files).end == offsets[-1] + 200


@pytest.mark.parametrize("operation", ["truncate", "open_append", "unlink"])
def test_begun_anew_on_a_failing_disk_it_is_mended_later(operation: str) -> None:
    files = FailingFiles()
    log = SegmentLog("log", SMALL, files=files)
    for _ in range(2):
        log.append(1, b"x" * 72, 0)
    files.failing = {operation: errno.EIO}
    with pytest.raises(OSError, match=r"Input/output"):
        log.start_anew()
    files.failing = {}
    log.repair()
    assert log.append(1, b"y" * 72, 0) == 200
    assert [record.payload[:1] for record in log.read(200)] == [b"y"]
