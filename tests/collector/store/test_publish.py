"""A publish is atomic, whatever stops it.

The tests also cover what a store reports when it is opened again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from builders.store_rows import START_UNIX_NS, request_rows, spans_of_requests
from doubles.failing_disk import StoppedError, StoppingFiles
from handrail_collector.rows import RequestRow
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.manifest import (
    MANIFEST,
    ManifestReader,
    PublishRecord,
    StoreDamagedError,
    StoredFile,
    encode_line,
    files_of,
)
from handrail_collector.store.publish import MAX_HOURS_A_PUBLISH, StoreLockedError, StorePublisher, by_hour
from handrail_collector.store.read import StoreReader
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table

ROWS = request_rows(12)
SPANS = spans_of_requests(6)
RANGES = (0, 100, 250)  # the ends of what the scenario publishes


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[StorePublisher]:
    opened = StorePublisher(tmp_path / "store")
    opened.open()
    yield opened
    opened.close()


def scenario(publisher: StorePublisher, done: list[int]) -> None:
    """Open a store, and publish the ranges that are missing.

    ``done`` gets each end that ``publish`` returned from.
    """
    recovered = publisher.open()
    done.append(recovered.end_offset)
    for index, (first, end) in enumerate(pairwise(RANGES)):
        if end > recovered.end_offset:
            spans = [replace(span, offset=first) for span in SPANS[index * 6 : index * 6 + 6]]
            publisher.publish(first, end, first, spans, ROWS[index * 6 : index * 6 + 6])
            done.append(end)


def stored(root: Path) -> tuple[set[str], int]:
    """Return request ids and the number of spans in the files of the manifest.

    DuckDB would take most of the time of these tests.
    """
    listed = [file for publish in ManifestReader(root).publishes() for file in publish.files]
    ids: list[bytes] = []
    for file in files_of(ManifestReader(root).publishes(), Table.REQUESTS):
        ids += pq.read_table(root / file.path, columns=["request_id"], partitioning=None)["request_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    spans = sum(pq.read_metadata(root / file.path).num_rows for file in listed if file.table is Table.SPANS)
    return {request_id.hex() for request_id in ids}, spans


def parquet_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.parquet*"))


def operations_of_scenario(root: Path) -> int:
    files = StoppingFiles()
    publisher = StorePublisher(root, files=files)
    scenario(publisher, [])
    publisher.close()
    return files.operations


some_or_all = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.eval)], ids=["some", "all"])


@some_or_all
@pytest.mark.parametrize("power_lost", [False, True], ids=["killed", "power_lost"])
def test_a_stop_at_any_operation_leaves_each_publish_whole_or_absent(tmp_path: Path, power_lost: bool, every: int) -> None:
    for stop_at in range(0, operations_of_scenario(tmp_path / "counted"), every):
        root = tmp_path / f"at{stop_at}"
        files = StoppingFiles(stop_at)
        publisher = StorePublisher(root, files=files)
        done = [0]
        with pytest.raises(StoppedError):
            scenario(publisher, done)
        publisher.close()
        if power_lost:
            files.lose_power()
        _check_recovery(root, done[-1], stop_at)


def _check_recovery(root: Path, acknowledged: int, stop_at: int) -> None:
    again = StorePublisher(root)
    recovered = again.open()
    where = f"stopped at operation {stop_at}, {acknowledged} acknowledged"
    assert recovered.end_offset in RANGES, where
    assert recovered.end_offset >= acknowledged, where
    publishes = RANGES.index(recovered.end_offset)
    ids, spans = stored(root)
    assert ids == {row.request_id for row in ROWS[: publishes * 6]}, where
    assert spans == publishes * 6, where
    assert {row_id for _, row_id, _ in recovered.evidence.values()} == {
        r.request_id for r in ROWS[max(publishes - 1, 0) * 6 : publishes * 6]
    }
    listed = [file.path for publish in ManifestReader(root).publishes() for file in publish.files]
    assert parquet_files(root) == sorted(listed), where
    again.close()
    scenario(again, [])
    again.close()
    assert stored(root)[0] == {row.request_id for row in ROWS}, where


def test_a_stop_while_a_crash_is_mended_changes_nothing(tmp_path: Path) -> None:
    total = operations_of_scenario(tmp_path / "counted")
    for stop_at in range(3):
        root = tmp_path / f"again{stop_at}"
        first = StorePublisher(root, files=StoppingFiles(total - 3 + stop_at))
        with pytest.raises(StoppedError):
            scenario(first, [])
        first.close()
        mending = StorePublisher(root, files=StoppingFiles(stop_at))
        with pytest.raises(StoppedError):
            scenario(mending, [])
        mending.close()
        _check_recovery(root, RANGES[1], stop_at)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99], ids=["nothing", "a_third", "all_but_the_end"])
def test_a_torn_last_line_was_never_published(tmp_path: Path, kept: float) -> None:
    root = tmp_path / "store"
    publisher = StorePublisher(root)
    scenario(publisher, [])
    publisher.close()
    lines = (root / MANIFEST).read_bytes().splitlines(keepends=True)
    *whole, last = lines
    (root / MANIFEST).write_bytes(b"".join(whole) + last[: int(len(last) * kept)])
    assert len(stored(root)[0]) == 6
    _check_recovery(root, RANGES[1], -1)


def test_a_wrong_line_in_the_middle_is_damage_and_removes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    publisher = StorePublisher(root)
    scenario(publisher, [])
    publisher.close()
    files = parquet_files(root)
    data = bytearray((root / MANIFEST).read_bytes())
    data[20] ^= 1
    (root / MANIFEST).write_bytes(data)
    for ask in (lambda: StorePublisher(root).open(), lambda: StoreReader(root).requests(RequestFilter())):
        with pytest.raises(StoreDamagedError, match=r"manifest\.jsonl"):
            ask()
    assert parquet_files(root) == files


def test_a_second_writer_is_kept_out(publisher: StorePublisher, tmp_path: Path) -> None:
    with pytest.raises(StoreLockedError, match="another collector"):
        StorePublisher(tmp_path / "store").open()
    publisher.close()
    second = StorePublisher(tmp_path / "store")
    second.open()
    second.close()


def test_an_unlisted_file_is_not_part_of_the_store_and_goes_at_start(publisher: StorePublisher, tmp_path: Path) -> None:
    """A file of an unfinished publish is removed at start.

    ``test_unlisted.py`` covers the other files.
    """
    root = tmp_path / "store"
    publisher.publish(0, 10, 0, [], ROWS[:3])
    (file,) = parquet_files(root)
    unfinished = f"requests-000-{10:020d}-{20:020d}-000.parquet"
    for name in (unfinished, f"{unfinished}.tmp", "requests-000-1-2.parquet.tmp"):
        (root / file).with_name(name).write_bytes((root / file).read_bytes())
    assert len(stored(root)[0]) == 3
    publisher.close()
    publisher.open()
    assert parquet_files(root) == [file]


def test_publishes_of_one_empty_range_do_not_replace_each_other(tmp_path: Path) -> None:
    root = tmp_path / "store"
    for index in range(4):
        publisher = StorePublisher(root)
        publisher.open()
        publisher.publish(7, 7, 0, [], ROWS[3 * index : 3 * index + 2])
        publisher.publish(7, 7, 0, [], ROWS[3 * index + 2 : 3 * index + 3])
        publisher.close()
    assert stored(root)[0] == {row.request_id for row in ROWS}


def test_a_publish_without_rows_moves_the_offsets(publisher: StorePublisher) -> None:
    publisher.publish(0, 40, 30, [], [])
    publisher.close()
    assert publisher.open() == Recovered(end_offset=40, low_water_offset=30, evidence={})


def test_rows_below_the_low_water_mark_are_not_recovered(publisher: StorePublisher) -> None:
    publisher.publish(0, 10, 0, [], ROWS[:2])
    publisher.publish(10, 20, 10, [], ROWS[2:3])
    publisher.close()
    kept = ROWS[2]
    recovered = publisher.open()
    assert recovered.evidence == dict.fromkeys(kept.span_ids, (kept.trace_id, kept.request_id, kept.version))


@pytest.mark.parametrize(
    ("first", "end", "low"),
    [(5, 20, 5), (10, 9, 5), (10, 20, 21), (10, 20, 4)],
    ids=["before_the_end", "backwards", "low_water_ahead", "low_water_back"],
)
def test_offsets_out_of_order_are_refused(publisher: StorePublisher, first: int, end: int, low: int) -> None:
    publisher.publish(0, 10, 5, [], [])
    with pytest.raises(ValueError, match="out of order"):
        publisher.publish(first, end, low, [], [])


def test_a_publisher_that_is_not_open_refuses(tmp_path: Path) -> None:
    closed = StorePublisher(tmp_path)
    closed.close()
    with pytest.raises(ValueError, match="not open"):
        closed.publish(0, 1, 0, [], [])


class FullDisk(StoppingFiles):
    """A disk that fails once, at one operation, as when it is full, and works after."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._fail_at = fail_at

    def _step(self) -> None:
        self.operations += 1
        if self.operations == self._fail_at:
            raise OSError(28, "No space left on device")


@some_or_all
def test_what_a_full_disk_stopped_can_be_tried_again(tmp_path: Path, every: int) -> None:
    for fail_at in range(1, operations_of_scenario(tmp_path / "counted") + 1, every):
        root = tmp_path / f"full{fail_at}"
        publisher = StorePublisher(root, files=FullDisk(fail_at))
        reader = ManifestReader(root)
        _twice(publisher.open)
        for index, (first, end) in enumerate(pairwise(RANGES)):
            rows, spans = ROWS[index * 6 : index * 6 + 6], SPANS[index * 6 : index * 6 + 6]
            _twice(partial(publisher.publish, first, end, first, spans, rows))
            assert reader.publishes()[-1].end_offset == end
        publisher.close()
        _check_recovery(root, RANGES[-1], fail_at)


def _twice(act: Callable[[], object]) -> None:
    try:
        act()
    except OSError:
        act()


def test_a_reader_forgets_a_line_that_was_taken_back(publisher: StorePublisher, tmp_path: Path) -> None:
    reader = StoreReader(tmp_path / "store")
    publisher.publish(0, 10, 0, [], ROWS[:1])
    manifest = tmp_path / "store" / MANIFEST
    before = manifest.read_bytes()
    publisher.publish(10, 20, 0, [], ROWS[1:2])
    assert [publish.end_offset for publish in reader.snapshot().publishes] == [10, 20]
    line = PublishRecord(shard=0, first_offset=10, end_offset=90, low_water_offset=10, files=())
    manifest.write_bytes(before + encode_line(line) + encode_line(replace(line, first_offset=90)))
    assert [publish.end_offset for publish in reader.snapshot().publishes] == [10, 90, 90]
    reader.close()


def test_a_reader_notices_a_new_generation_although_its_last_line_is_in_the_same_place(tmp_path: Path) -> None:
    file = StoredFile(
        table=Table.REQUESTS,
        path="requests/day=2026-11-30/hour=00/a.parquet",
        rows=1,
        bytes=1,
        min_unix_ns=1,
        max_unix_ns=1,
        min_version=1,
        max_version=1,
        columns_crc=1,
    )
    head = PublishRecord(generation=1, shard=0, first_offset=0, end_offset=9, low_water_offset=0, files=())
    first, last = (replace(head, generation=0, end_offset=end, files=(file,)) for end in (5, 9))
    reader = ManifestReader(tmp_path)
    for generation, path in ((1, file.path), (2, file.path.replace("a.", "b."))):
        lines = (replace(head, generation=generation), replace(first, files=(replace(file, path=path),)), last)
        (tmp_path / MANIFEST).write_bytes(b"".join(map(encode_line, lines)))
        assert [f.path for f in files_of(reader.publishes(), Table.REQUESTS)] == [path, file.path]


def test_a_manifest_of_the_first_version_is_read(publisher: StorePublisher, tmp_path: Path) -> None:
    publisher.publish(0, 10, 0, [], ROWS[:2])
    publisher.close()
    manifest = tmp_path / "store" / MANIFEST
    fields = json.loads(manifest.read_bytes().splitlines()[-1].partition(b" ")[2]) | {"v": 1}
    del fields["generation"], fields["retired"], fields["files"][0]["written_unix_ns"]
    text = json.dumps(fields).encode()
    manifest.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert publisher.open().end_offset == 10
    publisher.retire({publisher.publishes()[0].files[0].path})
    assert stored(tmp_path / "store")[0] == set()
    with pytest.raises(ValueError, match="not in the store"):
        publisher.retire({"requests/day=2026-11-30/hour=00/other.parquet"})


def test_rows_lie_in_the_hour_of_their_start(publisher: StorePublisher, tmp_path: Path) -> None:
    rows = [replace(row, started_unix_ns=START_UNIX_NS + index * HOUR_NS) for index, row in enumerate(ROWS[:3])]
    publisher.publish(0, 1, 0, [], rows)
    assert [Path(file).parent.as_posix() for file in parquet_files(tmp_path / "store")] == [
        f"requests/day={day}/hour={hour}" for day, hour in _folders(rows)
    ]


def _folders(rows: Sequence[RequestRow]) -> list[tuple[str, str]]:
    times = [datetime.fromtimestamp(row.started_unix_ns // 10**9, timezone.utc) for row in rows]
    return [(f"{at:%Y-%m-%d}", f"{at:%H}") for at in times]


def test_clocks_gone_wild_do_not_make_folders_without_bound() -> None:
    starts = [hour * HOUR_NS for hour in range(500)] + [499 * HOUR_NS + 1, 2**63 - 1, 0]
    groups = by_hour(starts)
    assert len(groups) == MAX_HOURS_A_PUBLISH
    assert sorted(at for places in groups.values() for at in places) == list(range(len(starts)))
