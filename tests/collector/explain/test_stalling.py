"""The stalls of a period: from rows to shares, events and sentences.

Case B12 runs as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.records import EPOCH, MS
from builders.stalls import gc_of_case_B12
from builders.store_rows import request_rows
from handrail_collector.batch import publish, rows_of
from handrail_collector.explain.period.report import PeriodAnswer, explain, stalling
from handrail_collector.explain.period.summary import summary
from handrail_collector.rows import NO_STALLS, StallRow
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.quarantine import ADVICE
from handrail_collector.store.queries.period import NO_STALLS as NOTHING
from handrail_collector.store.queries.period import load_period, stall_counts
from handrail_collector.store.read import StoreReader

S = 1000 * MS
WHOLE = PeriodQuery(since_unix_ns=EPOCH, until_unix_ns=EPOCH + 60 * S)


def stall(at_ms: float, gap_ms: float = 100, *, request: str = "r0", number: int = 0, version: int = 1, **more: Any) -> StallRow:
    return StallRow(
        **{
            "started_unix_ns": EPOCH + round(at_ms * MS),
            "trace_id": f"{int(request[1:]) + 1:032x}",
            "request_id": f"{int(request[1:]) + 1:016x}",
            "version": version,
            "number": number,
            "scope": "edge",
            "host": "d0",
            "gap_ns": round(gap_ms * MS),
            "median_ns": 10 * MS,
            "cause": "host_pause",
            **more,
        }
    )


def counted(tmp_path: Path, stalls: Sequence[StallRow], of: PeriodQuery = WHOLE, cuts: dict[str, int] | None = None) -> list[Any]:
    publish(tmp_path, request_rows(1), stalls=list(stalls))
    with closing(StoreReader(tmp_path / "store", threads=1)) as reader:
        rows: list[Any] = stall_counts(reader, of, cuts or {}).to_pylist()
    return rows


def test_simultaneous_stalls_of_one_host_are_one_event(tmp_path: Path) -> None:
    """Stalls of one host that overlap in time are one event.

    It does not matter which stream stalled longest. Stalls of another host or with another cause are other events.
    """
    stall_rows = [
        stall(1000, 300, request="r0"),
        stall(1100, 100, request="r1"),
        stall(1290, 100, request="r2"),  # begins while the first stream stalls, ends after it
        stall(1350, 50, request="r3"),
        stall(5000, request="r0", number=1),
        stall(8000, request="r1", number=1),
        stall(1000, request="r4", host="d1"),
        stall(1000, request="r5", cause="unknown", host=None, instance="d0:8200"),
    ]
    rows = counted(tmp_path, stall_rows, cuts={"edge": 200 * MS})
    assert [(row["cause"], row["host"], row["stalls"], row["streams"], row["events"], row["longest"]) for row in rows] == [
        ("host_pause", "d0", 6, 4, 3, 1),
        ("host_pause", "d1", 1, 1, 1, 0),
        ("unknown", "d0:8200", 1, 1, 1, 0),
    ]
    assert [row["every_ns"] for row in rows] == [3500 * MS, None, None]


def test_the_newest_version_of_a_request_counts_and_a_withdrawn_one_does_not(tmp_path: Path) -> None:
    stall_rows = [
        stall(1000, request="r0"),
        stall(2000, request="r0", number=1),
        stall(1000, request="r0", version=2, cause="kv_landing"),
        stall(1000, request="r1"),
        stall(0, request="r1", number=NO_STALLS, version=2),
    ]
    assert [(row["cause"], row["stalls"]) for row in counted(tmp_path, stall_rows)] == [("kv_landing", 1)]


def test_stalls_outside_the_query_are_not_counted(tmp_path: Path) -> None:
    stall_rows = [
        stall(-1, request="r0"),
        stall(0, request="r1"),
        stall(59_999, request="r2"),
        stall(60_000, request="r3"),
        stall(5, request="r4", scope="router"),
        stall(5, request="r5", model="other"),
    ]
    assert [row["stalls"] for row in counted(tmp_path, stall_rows, replace(WHOLE, scope="edge"))] == [3]
    with closing(StoreReader(tmp_path / "store", threads=1)) as reader:
        assert stall_counts(reader, replace(WHOLE, model="other"), {}).column("streams").to_pylist() == [1]
        assert stall_counts(reader, replace(WHOLE, since_unix_ns=EPOCH + 10**15, until_unix_ns=EPOCH + 10**16), {}) == NOTHING


def test_a_damaged_file_is_reported_as_damaged(tmp_path: Path) -> None:
    assert counted(tmp_path, [stall(0)])
    for file in (tmp_path / "store").rglob("*stalls*/**/*.parquet"):
        file.write_bytes(b"PAR1 and then nothing")
    with closing(StoreReader(tmp_path / "store", threads=1)) as reader, pytest.raises(StoreDamagedError, match=ADVICE):
        stall_counts(reader, WHOLE, {})


_HOSTS = st.sampled_from(["d0", "d1"])
_CAUSES = st.sampled_from(["host_pause", "kv_landing", "unknown"])
_COUNTS = st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(0, 1))


@given(st.dictionaries(st.tuples(_CAUSES, _HOSTS), _COUNTS, min_size=1))
def test_shares_add_up_and_the_host_is_the_one_with_most(report: dict[tuple[str, str], tuple[int, int, int]]) -> None:
    table = NOTHING.from_pylist(
        [
            {
                "scope": "edge",
                "cause": cause,
                "host": host,
                "stalls": stalls,
                "streams": 1,
                "events": events,
                "every_ns": None,
                "gap_sum_ns": stalls * MS,
                "gap_max_ns": stalls * MS,
                "longest": longest,
                "lift": None,
            }
            for (cause, host), (stalls, events, longest) in report.items()
        ],
        schema=NOTHING.schema,
    )
    found = stalling(table)
    assert found is not None
    assert found.stalls == sum(stalls for stalls, _, _ in report.values())
    assert sum(each.share for each in found.causes) == pytest.approx(1)
    assert [each.stalls for each in found.causes] == sorted((each.stalls for each in found.causes), reverse=True)
    for each in found.causes:
        most = max(stalls for (cause, _), (stalls, _, _) in report.items() if cause == each.cause)
        assert report[each.cause, each.host][0] == most
        assert each.host_share == pytest.approx(most / each.stalls)
    longest = [each.longest_share for each in found.causes]
    assert all(share is None for share in longest) or sum(share or 0 for share in longest) == pytest.approx(1)


def test_no_stall_is_nothing() -> None:
    assert stalling(NOTHING) is None


def answer_of(tmp_path: Path, records: Sequence[Any]) -> PeriodAnswer:
    stalls: list[StallRow] = []
    publish(tmp_path, rows_of(((EPOCH + 3600 * S, record) for record in records), stalls=stalls), stalls=stalls)
    with closing(StoreReader(tmp_path / "store", threads=1)) as reader:
        return explain(load_period(reader, WHOLE, fast=False))


def test_B12_sixty_gaps_become_three_events_of_a_process(tmp_path: Path) -> None:
    expected, records = gc_of_case_B12()
    (scope,) = answer_of(tmp_path, records).scopes
    assert scope.stalls is not None
    causes = {each.cause: each for each in scope.stalls.causes}
    assert scope.stalls.stalls == expected["not_outliers"]
    paused = causes["host_pause"]
    assert paused.events == expected["stall_events"]
    assert paused.streams == 20
    assert paused.every_ns == pytest.approx(1500 * MS, rel=0.01)
    assert paused.share > 0.9
    assert "100 % host_pause (3 events, one every 1.50 s; most at" in " ".join(summary(scope))
