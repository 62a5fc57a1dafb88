"""Tables of samples: round trip through a file with any names, and compaction.

Nothing is lost in a file; compaction keeps what it must.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.device_samples import COUNTING_SINCE, START_UNIX_NS, S, busy_host, counter, flattened, gauge, gpu, process, sample
from builders.engine_samples import engine_sample
from handrail.records.devices import DeviceSample, DeviceValue, runs
from handrail_collector.store.compaction import alike, fold_samples
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.layout import DAY_NS
from handrail_collector.store.schema import Table, encode
from handrail_collector.store.tables.samples import MAX_SERIES_COLUMNS, SAMPLED, is_series
from harness.store import ROWS, Kept

GPU = SAMPLED[Table.GPU_SAMPLES]
EVERYTHING = SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62)
_TEXT = st.sampled_from(["", "a", "receive", "B", "x.y", "50%", "%2e", 'q"uote', "é", "i.d"])


def stored(table: Table, samples: list[DeviceSample]) -> pa.Table:
    """Return the samples as read back from their file."""
    made = SAMPLED[table].encode(runs(samples))
    return pq.read_table(pa.BufferReader(encode(made, table, SAMPLED[table].columns_of(made))))


@settings(deadline=None)  # the first call loads pyarrow
@given(
    st.lists(
        st.lists(
            st.builds(
                DeviceValue,
                name=_TEXT,
                value=st.integers(-5, 2**63 - 1) | st.floats(allow_nan=False),
                label=_TEXT,
                start_unix_ns=st.sampled_from([0, 0, 7, COUNTING_SINCE]),
            ),
            max_size=6,
            unique_by=lambda value: (value.name, value.label),
        ),
        max_size=6,
    )
)
def test_whatever_names_and_labels_come_every_value_comes_back(rows: list[list[DeviceValue]]) -> None:
    samples = [sample(gpu(), START_UNIX_NS + at, *values) for at, values in enumerate(rows)]
    back = GPU.decode(stored(Table.GPU_SAMPLES, samples).to_pylist())
    assert back == samples
    assert [[type(v.value) for v in one.values] for one in back] == [[type(v.value) for v in one.values] for one in samples]


def test_a_series_is_a_column_that_anyones_sql_can_read_and_its_rows_are_neighbours() -> None:
    table = stored(Table.GPU_SAMPLES, flattened(list(busy_host(1, gpus=2))))
    assert {"g.d.utilization_ratio", "c.i.nvlink_bytes.receive", "g.i.clock_hertz.sm"} <= set(table.column_names)
    devices = table["device"].to_pylist()
    assert devices == sorted(devices)
    assert table["c.i.nvlink_bytes.receive"][:10].to_pylist() == sorted(table["c.i.nvlink_bytes.receive"][:10].to_pylist())


def test_of_more_series_than_a_file_may_have_columns_the_rest_is_kept_beside_them() -> None:
    wide = [sample(gpu(), START_UNIX_NS, *(gauge("g", at, f"l{at:04d}") for at in range(MAX_SERIES_COLUMNS + 50)))]
    table = stored(Table.GPU_SAMPLES, wide)
    assert sum(map(is_series, table.column_names)) == MAX_SERIES_COLUMNS
    assert GPU.decode(table.to_pylist()) == wide


def test_a_row_that_is_none_is_damage() -> None:
    (row,) = stored(Table.GPU_SAMPLES, [sample(gpu(), 1, counter("c", 1))]).to_pylist()
    for broken in (
        row | {"kind": "npu"},
        row | {"since_unix_ns": None},
        row | {"more": "[]"},
        {name: value for name, value in row.items() if name != "device"},
    ):
        with pytest.raises(ValueError, match=r"."):
            GPU.decode([broken])


def test_folding_keeps_each_sample_once_in_the_order_of_the_table_with_every_column() -> None:
    samples = flattened(list(busy_host(2, gpus=3)))
    more = [replace(one, values=(*one.values, gauge("new", 1.5))) for one in samples[30:]]
    again = samples[:12]
    made = [GPU.encode(runs(part)) for part in (samples[:30], more, again)]
    table, columns = fold_samples(Table.GPU_SAMPLES, made)
    assert table.column_names == [column.name for column in columns]
    back = GPU.decode(pq.read_table(pa.BufferReader(encode(table, Table.GPU_SAMPLES, columns))).to_pylist())
    expected = sorted([*samples[:30], *more], key=lambda one: one.at_unix_ns)
    assert [(one.at_unix_ns, set(one.values)) for one in back] == [(one.at_unix_ns, set(one.values)) for one in expected]
    assert table.equals(GPU.ordered(table))


def test_files_whose_columns_do_not_fit_into_one_are_not_folded_together() -> None:
    half = [f"g.d.a{at}" for at in range(MAX_SERIES_COLUMNS // 2)]
    rest = [f"g.d.b{at}" for at in range(MAX_SERIES_COLUMNS // 2)]
    assert alike(Table.GPU_SAMPLES, [["at_unix_ns", *half], half, rest, ["g.d.c"]]) == [3, 1]


@pytest.mark.parametrize("table", [Table.GPU_SAMPLES, Table.ENGINE_SAMPLES])
def test_samples_are_folded_expire_and_count_for_the_quota(store: Kept, table: Table) -> None:
    device_samples = flattened(list(busy_host(2)))
    samples: list[Any] = device_samples if table is Table.GPU_SAMPLES else [engine_sample(at) for at in range(8)]
    for number in range(4):
        rows = runs(device_samples[number::4]) if table is Table.GPU_SAMPLES else samples[number::4]
        store.publisher.publish(number * 10, number * 10 + 10, 0, [], [], flat={table: rows})
    assert len(store.files(table)) == 4
    upkeep = store.upkeep(closed_after_ns=0)
    upkeep.run_pass()
    assert (upkeep.stats.failures, len(store.files(table))) == (0, 1)
    found = store.reader.samples(table, EVERYTHING)
    assert {(one.at_unix_ns, getattr(one, "device", None)) for one in found} == {
        (one.at_unix_ns, getattr(one, "device", None)) for one in samples
    }
    assert len(found) == len(samples)
    store.upkeep(closed_after_ns=0, retention_ns=1, max_bytes=10).run_pass()
    assert store.files(table) == []
    assert store.reader.samples(table, EVERYTHING) == []


def on_days(store: Kept, *days: int) -> None:
    """Publish a request and samples a day; the clock stays in the last one."""
    for index, day in enumerate(days):
        store.clock.unix_ns = at = START_UNIX_NS + day * DAY_NS
        rows = [sample(gpu(), at + tick, counter("c", tick)) for tick in range(50)]
        request = replace(ROWS[index], started_unix_ns=at)
        store.publisher.publish(index * 10, index * 10 + 10, 0, [], [request], flat={Table.GPU_SAMPLES: runs(rows)})


def days_of(store: Kept, table: Table) -> list[int]:
    return sorted({(file.min_unix_ns - START_UNIX_NS) // DAY_NS for file in store.files(table)})


def test_samples_leave_before_requests_do(store: Kept) -> None:
    on_days(store, 0, 1, 2, 3, 4)
    upkeep = store.upkeep(retention_ns=3 * DAY_NS, samples_retention_ns=DAY_NS)
    upkeep.run_pass()
    assert (days_of(store, Table.REQUESTS), days_of(store, Table.GPU_SAMPLES)) == ([1, 2, 3, 4], [3, 4])
    assert upkeep.stats.files_expired == 4
    store.upkeep(retention_ns=DAY_NS, samples_retention_ns=30 * DAY_NS).run_pass()  # never longer than the retention of requests
    assert (days_of(store, Table.REQUESTS), days_of(store, Table.GPU_SAMPLES)) == ([3, 4], [3, 4])
    store.upkeep(retention_ns=None, samples_retention_ns=None).run_pass()
    assert days_of(store, Table.GPU_SAMPLES) == [3, 4]


def test_where_space_is_short_the_oldest_samples_go_first_then_whole_days(store: Kept, caplog: pytest.LogCaptureFixture) -> None:
    on_days(store, 0, 1, 2)
    files = [*store.files(Table.REQUESTS), *store.files(Table.GPU_SAMPLES)]
    size = sum(file.bytes for file in files)
    with caplog.at_level(logging.WARNING):
        upkeep = store.upkeep(max_bytes=size - 1)
        upkeep.run_pass()
        assert (days_of(store, Table.REQUESTS), days_of(store, Table.GPU_SAMPLES)) == ([0, 1, 2], [1, 2])
        assert (upkeep.stats.quota_days, "the samples of 2026-11-30 left it" in caplog.text) == (0, True)
        upkeep = store.upkeep(max_bytes=1)
        upkeep.run_pass()
    assert (days_of(store, Table.REQUESTS), days_of(store, Table.GPU_SAMPLES)) == ([2], [2])
    assert upkeep.stats.quota_days == 2
    assert "the samples of 2026-12-01, 2026-11-30, 2026-12-01 left it" in caplog.text


def test_a_second_of_many_hosts_is_folded_into_files_of_bounded_size(store: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail_collector.store.compaction.MAX_SAMPLES", 50)
    for number in range(4):
        of = process(f"h{number}")
        rows = [sample(gpu(), START_UNIX_NS + at * S // 20, gauge("x", at), of=of) for at in range(20)]
        store.publisher.publish(number * 10, number * 10 + 10, 0, [], [], flat={Table.GPU_SAMPLES: runs(rows)})
    store.upkeep(closed_after_ns=0).run_pass()
    assert [file.rows for file in store.files(Table.GPU_SAMPLES)] == [40, 40]
