"""The columns of a period hold the same rows as the reader's answer.

Of each request that is the newest version, and no withdrawn one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builders.store_rows import START_UNIX_NS, request_rows
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.filters import PeriodQuery, RequestFilter
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.scan import ScopeCount, compared_requests, scopes
from handrail_collector.store.read import StoreReader

SECOND = 10**9
ROWS = [replace(row, version=1, started_unix_ns=START_UNIX_NS + at * SECOND) for at, row in enumerate(request_rows(40))]
MOVED = replace(ROWS[3], version=2, outcome="moved", started_unix_ns=ROWS[3].started_unix_ns + 100 * SECOND)
LATER = [
    replace(ROWS[0], version=2, outcome="changed"),
    replace(ROWS[1], version=3, scope=MERGED),
    MOVED,
    replace(ROWS[5], version=2, scope="decode"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publisher = StorePublisher(tmp_path)
    publisher.open()
    publisher.publish(0, 10, 10, [], ROWS[:30])
    publisher.publish(10, 20, 20, [], [*ROWS[30:], *LATER])
    publisher.close()
    return tmp_path


def found(root: Path, wanted: PeriodQuery) -> set[tuple[int, int, str]]:
    columns = ("duration_ns", "started_unix_ns", "outcome")
    return {
        row
        for batch in compared_requests(root, wanted)
        for row in zip(*(batch[name].to_pylist() for name in columns), strict=True)
    }


def of(rows: list[RequestRow]) -> set[tuple[int, int, str]]:
    return {(row.duration_ns, row.started_unix_ns, row.outcome) for row in rows}


@pytest.mark.parametrize(
    ("wanted", "same"),
    [
        pytest.param(PeriodQuery(), RequestFilter(limit=1000), id="all"),
        pytest.param(PeriodQuery(scope="edge"), RequestFilter(scope="edge", limit=1000), id="scope"),
        pytest.param(PeriodQuery(model="tiny"), RequestFilter(model="tiny", limit=1000), id="model"),
        pytest.param(PeriodQuery(model="huge"), RequestFilter(model="huge", limit=1000), id="no-such-model"),
        pytest.param(
            PeriodQuery(since_unix_ns=START_UNIX_NS, until_unix_ns=START_UNIX_NS + 31 * SECOND),
            RequestFilter(since_unix_ns=START_UNIX_NS, until_unix_ns=START_UNIX_NS + 31 * SECOND, limit=1000),
            id="time",
        ),
    ],
)
def test_the_rows_are_those_that_the_reader_gives(root: Path, wanted: PeriodQuery, same: RequestFilter) -> None:
    reader = StoreReader(root)
    assert found(root, wanted) == of(reader.requests(same))
    reader.close()


def test_the_newest_version_counts_wherever_it_began(root: Path) -> None:
    everything = found(root, PeriodQuery())
    assert of([MOVED]) <= everything
    assert of([ROWS[3]]) & everything == set()
    assert of([ROWS[3]]) & found(root, PeriodQuery(until_unix_ns=START_UNIX_NS + 10 * SECOND)) == set()
    assert of([ROWS[1]]) & everything == set()  # withdrawn


def test_scopes_are_counted_with_their_times(root: Path) -> None:
    edge, decode = scopes(root, PeriodQuery())
    assert decode == ScopeCount("decode", 1, ROWS[5].started_unix_ns, ROWS[5].started_unix_ns)
    assert edge == ScopeCount("edge", 38, ROWS[0].started_unix_ns, MOVED.started_unix_ns)


def test_a_time_without_files_is_empty(root: Path, tmp_path: Path) -> None:
    assert scopes(root, PeriodQuery(since_unix_ns=START_UNIX_NS + 10**6 * SECOND)) == []
    assert found(tmp_path / "nowhere", PeriodQuery()) == set()


def test_a_damaged_file_is_reported(root: Path) -> None:
    next(root.rglob("*.parquet")).write_bytes(b"nothing that Parquet is")
    with pytest.raises(StoreDamagedError, match=str(root)):
        found(root, PeriodQuery())
