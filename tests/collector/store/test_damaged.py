"""A file that cannot be read.

It is named, counted and left out of maintenance. A person can take it out of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders.store_rows import START_UNIX_NS, request_rows
from doubles.damaged_parquet import DAMAGES, damage
from handrail_collector.rows import MERGED
from handrail_collector.store.layout import DAY_NS, HOUR_NS
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.quarantine import ADVICE, READ_ERRORS, read_checked
from handrail_collector.store.schema import Table
from harness.store import EVERYTHING, PUBLISHED, ROWS, Kept, publish_all


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("table", PUBLISHED)  # rollups: test_rollups.py
def test_the_others_of_its_hour_are_folded_and_a_copy_mends_it(
    store: Kept, table: Table, how: Callable[[bytes], bytes | None], caplog: pytest.LogCaptureFixture
) -> None:
    publish_all(store.publisher)
    victim = store.files(table)[1]
    data = damage(store.root / victim.path, how)
    upkeep = store.upkeep()
    for _ in range(3):
        upkeep.run_pass()
    assert (upkeep.stats.failures, upkeep.stats.files_damaged) == (0, 1)
    assert sorted(file.rows for file in store.files(table)) == [3, 9]
    assert victim in store.files(table)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 1
    assert victim.path in lines[0]
    assert ADVICE in lines[0]
    (store.root / victim.path).write_bytes(data)
    upkeep.run_pass()
    assert upkeep.stats.files_damaged == 0
    assert [file.rows for file in store.files(table)] == [12]
    assert store.reader.requests(EVERYTHING) == ROWS


@pytest.mark.parametrize("how", [DAMAGES["other_bytes"], DAMAGES["cut"], DAMAGES["empty"], DAMAGES["missing"]])
def test_a_question_that_needs_it_names_it_until_it_is_put_aside(store: Kept, how: Callable[[bytes], bytes | None]) -> None:
    publish_all(store.publisher)
    path = store.root / store.files(Table.REQUESTS)[0].path
    data = damage(path, how)
    with pytest.raises(StoreDamagedError, match=rf"{path.name}.*rename it to end in \.damaged"):
        store.reader.requests(EVERYTHING)
    path.unlink(missing_ok=True)
    aside = path.with_name(f"{path.name}.damaged")
    aside.write_bytes(data)
    upkeep = store.upkeep(grace_ns=0)
    upkeep.run_pass()
    assert (upkeep.stats.files_set_aside, upkeep.stats.files_damaged) == (1, 0)
    assert store.reader.requests(EVERYTHING) == ROWS[3:]
    store.publisher.close()
    store.publisher.open()
    assert aside.exists(), "a start removes what is not listed, but not what a person put aside"


def test_a_start_goes_on_with_a_damaged_file_of_recent_rows(store: Kept, caplog: pytest.LogCaptureFixture) -> None:
    store.publisher.publish(0, 10, 0, [], ROWS[:2])
    store.publisher.publish(10, 20, 0, [], ROWS[2:3])
    path = store.root / store.files(Table.REQUESTS)[0].path
    damage(path, DAMAGES["cut"])
    store.publisher.close()
    recovered = store.publisher.open()
    assert recovered.end_offset == 20
    assert set(recovered.evidence) == set(ROWS[2].span_ids)
    assert path.name in caplog.text


def test_a_withdrawal_stays_while_a_file_that_may_hold_its_row_cannot_be_read(store: Kept) -> None:
    withdrawn = replace(ROWS[0], version=2, scope=MERGED, span_ids=(), joins=())
    store.publisher.publish(0, 10, 0, [], ROWS[:1])
    store.publisher.publish(10, 20, 0, [], [withdrawn])
    store.publisher.publish(20, 30, 0, [], ROWS[1:2])
    path = store.root / store.files(Table.REQUESTS)[0].path
    data = damage(path, DAMAGES["cut"])
    upkeep = store.upkeep()
    upkeep.run_pass()
    path.write_bytes(data)
    assert store.reader.requests(EVERYTHING) == ROWS[1:2], "the row came back with its file"
    upkeep.run_pass()
    upkeep.run_pass()
    assert store.reader.requests(EVERYTHING) == ROWS[1:2]
    assert [file.rows for file in store.files(Table.REQUESTS)] == [1]


def test_a_failing_machine_is_no_damaged_file(store: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_all(store.publisher)
    upkeep = store.upkeep()

    def fails(path: Path, **options: bool) -> pa.Table:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", fails)
        upkeep.run_pass()
    assert (upkeep.stats.failures, upkeep.stats.files_damaged) == (2, 0)
    upkeep.run_pass()
    assert len(store.files(Table.REQUESTS)) == 1


def test_an_expired_file_that_nobody_can_read_waits_until_nothing_is_left_that_it_may_withdraw(store: Kept) -> None:
    store.clock.unix_ns = START_UNIX_NS
    later = [replace(row, started_unix_ns=row.started_unix_ns + DAY_NS) for row in request_rows(1, seed=5)]
    store.publisher.publish(0, 10, 0, [], [replace(ROWS[0], version=2)])
    store.clock.unix_ns += DAY_NS
    store.publisher.publish(10, 20, 0, [], [replace(later[0], version=1)])
    damage(store.root / store.files(Table.REQUESTS)[0].path, DAMAGES["cut"])
    upkeep = store.upkeep(retention_ns=DAY_NS)
    store.clock.unix_ns = (START_UNIX_NS // DAY_NS + 2) * DAY_NS + HOUR_NS
    upkeep.run_pass()
    assert len(store.files(Table.REQUESTS)) == 2
    store.clock.unix_ns += DAY_NS
    upkeep.run_pass()
    assert store.files(Table.REQUESTS) == []
    assert upkeep.stats.failures == 0


def _footers(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` with each byte of its footer turned.

    The footer has no checksum of its own.
    """
    size = int.from_bytes(data[-8:-4], "little")
    for at in range(len(data) - 8 - size, len(data) - 8):
        yield data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]


def _reads_otherwise(path: Path, data: bytes, rows: pa.Table) -> bool:
    path.write_bytes(data)
    try:
        return not read_checked(path).equals(rows)
    except READ_ERRORS:
        return False


def test_a_footer_with_other_bytes_never_reads_as_other_rows(store: Kept) -> None:
    """A damaged footer never reads as other rows.

    It holds names and types of columns. Compaction would make wrong ones permanent, and a start would fail on them.
    """
    store.publisher.publish(0, 10, 0, [], ROWS[:1])
    store.publisher.publish(10, 20, 0, [], ROWS[1:2])
    path = store.root / store.files(Table.REQUESTS)[0].path
    data, rows = path.read_bytes(), read_checked(path)
    others = [each for each in list(_footers(data))[::29] if _reads_otherwise(path, each, rows)]
    assert others, "each of them is noticed without a checksum"
    for spoilt in others[:: 1 + len(others) // 6]:
        path.write_bytes(spoilt)
        store.publisher.close()
        assert set(store.publisher.open().evidence) == set(ROWS[1].span_ids)
        upkeep = store.upkeep()
        upkeep.run_pass()
        assert (upkeep.stats.failures, upkeep.stats.files_damaged) == (0, 1)
        assert len(store.files(Table.REQUESTS)) == 2, "it was folded in"


def test_a_question_over_a_broken_footer_names_the_file_whatever_duckdb_calls_it(store: Kept) -> None:
    publish_all(store.publisher)
    path = store.root / store.files(Table.REQUESTS)[1].path
    data = path.read_bytes()
    for spoilt in list(_footers(data))[::101]:
        path.write_bytes(spoilt)
        try:
            store.reader.requests(EVERYTHING)
            store.reader.count(EVERYTHING)
        except StoreDamagedError as error:
            assert path.name in str(error)  # noqa: PT017 - some are read


def test_a_column_whose_name_is_damaged_names_the_file(store: Kept) -> None:
    """DuckDB ignores the case of column names.

    It answers with the damaged name.
    """
    store.publisher.publish(0, 10, 0, [], ROWS[:1])
    path = store.root / store.files(Table.REQUESTS)[0].path
    path.write_bytes(path.read_bytes().replace(b"operation", b"opeRation"))
    with pytest.raises(StoreDamagedError, match=path.name):
        store.reader.requests(EVERYTHING)
