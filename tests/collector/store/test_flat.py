"""Tables of plain dataclasses: round trip through a file, and compaction.

Nothing is lost in a file; compaction keeps what it must.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders.dataclass_rows import flat_row
from builders.store_rows import START_UNIX_NS
from doubles.store_filters import newest_version
from handrail_collector.rows import WITHDRAWN_FETCHES, FetchRow
from handrail_collector.store.compaction import fold_flat
from handrail_collector.store.filters import FetchFilter
from handrail_collector.store.schema import Table, encode
from handrail_collector.store.tables.append_only import FLAT
from harness.store import Kept


@pytest.mark.parametrize("table", FLAT)
def test_every_field_comes_back_and_a_column_that_an_older_file_lacks_is_its_default(table: Table) -> None:
    flat = FLAT[table]
    rows = [flat_row(table, number, START_UNIX_NS + number) for number in range(5)]
    written = pq.read_table(pa.BufferReader(encode(flat.encode(rows), table, flat.columns)))
    assert [flat.decode(stored) for stored in written.to_pylist()] == rows
    if table is Table.KV_FETCHES:
        older = {name: value for name, value in written.to_pylist()[0].items() if name != "lost_ns"}
        assert flat.decode(older) == replace(rows[0], lost_ns=None)


def fetch(number: int, version: int, **more: object) -> FetchRow:
    made: FetchRow = flat_row(Table.KV_FETCHES, 1, START_UNIX_NS, number=number, version=version, **more)
    return made


def test_of_a_requests_hand_offs_those_of_its_last_version_are_kept_each_number_once() -> None:
    flat = FLAT[Table.KV_FETCHES]
    other = flat_row(Table.KV_FETCHES, 9, START_UNIX_NS + 5, version=1, number=0)
    reports = [[fetch(0, 1), fetch(1, 1), other], [fetch(0, 2, outcome="ok"), fetch(0, 2, outcome="failed")]]
    table, _ = fold_flat(Table.KV_FETCHES, [flat.encode(rows) for rows in reports])
    kept = [flat.decode(stored) for stored in table.to_pylist()]
    assert [(row.version, row.number, row.outcome) for row in kept] == [(2, 0, "failed"), (1, 0, other.outcome)]
    assert kept == newest_version([row for rows in reports for row in rows])


def test_a_hand_off_that_was_withdrawn_is_answered_no_more(store: Kept) -> None:
    store.publisher.publish(0, 10, 0, [], [], flat={Table.KV_FETCHES: [fetch(0, 1)]})
    assert len(store.reader.fetches(FetchFilter())) == 1
    store.publisher.publish(10, 20, 0, [], [], flat={Table.KV_FETCHES: [fetch(WITHDRAWN_FETCHES, 2)]})
    assert store.reader.fetches(FetchFilter()) == []
    store.upkeep(closed_after_ns=0).run_pass()
    assert store.reader.fetches(FetchFilter()) == []


def test_an_event_reported_twice_is_one(store: Kept) -> None:
    once = flat_row(Table.PROCESS_EVENTS, 1, START_UNIX_NS)
    store.publisher.publish(0, 10, 0, [], [], flat={Table.PROCESS_EVENTS: [once]})
    store.publisher.publish(10, 20, 0, [], [], flat={Table.PROCESS_EVENTS: [replace(once, offset=once.offset + 10)]})
    assert len(store.reader.events(Table.PROCESS_EVENTS, 0, 1 << 62)) == 1
    store.upkeep(closed_after_ns=0).run_pass()
    (file,) = store.files(Table.PROCESS_EVENTS)
    assert file.rows == 1
