"""The neighbours that a request is compared with: which, and how many at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from builders.period import period
from builders.request_rows import ROWS, STARTED
from handrail_collector.rows import RequestRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries import neighbours as module
from handrail_collector.store.queries.neighbours import HALF_NS, around
from handrail_collector.store.read import StoreReader


def stored(folder: Path, rows: Sequence[RequestRow]) -> StoreReader:
    publisher = StorePublisher(folder)
    publisher.open()
    known = [replace(row, request_id=f"{number:016x}", trace_id=f"{number:032x}") for number, row in enumerate(rows)]
    publisher.publish(0, 10_000, 10_000, [], known)
    publisher.close()
    return StoreReader(folder)


def test_those_of_its_hour_scope_and_model(tmp_path: Path) -> None:
    rows, _ = period(requests=100)
    strangers = [
        replace(rows[0], scope="decode"),
        replace(rows[0], model="another"),
        replace(rows[0], started_unix_ns=STARTED + 2 * HALF_NS),
        ROWS["not_streamed"],
    ]
    reader = stored(tmp_path, [*rows, *strangers])
    found = around(reader, rows[50])
    assert found.rows["started_unix_ns"].to_pylist() == [row.started_unix_ns for row in rows]
    assert found.rows["uncached_tokens"].to_pylist() == [row.prompt_tokens for row in rows]
    assert (found.since_unix_ns, found.until_unix_ns) == (rows[50].started_unix_ns - HALF_NS, rows[50].started_unix_ns + HALF_NS)
    reader.close()


def test_far_from_every_other_there_are_none(tmp_path: Path) -> None:
    rows, _ = period(requests=10)
    reader = stored(tmp_path, rows)
    assert around(reader, replace(rows[0], started_unix_ns=STARTED + 9 * HALF_NS)).rows.num_rows == 0
    reader.close()


def test_of_many_a_sample_from_a_shorter_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = period(requests=3000)
    reader = stored(tmp_path, rows)
    monkeypatch.setattr(module, "SAMPLE", 100)
    assert 50 <= around(reader, rows[1500]).rows.num_rows <= 200
    monkeypatch.setattr(module, "SAMPLE", 10_000)
    monkeypatch.setattr(module, "MOST_READ", 1500)
    monkeypatch.setattr(module, "LEAST_HALF_NS", 1_000_000_000)
    found = around(reader, rows[1500])
    assert found.until_unix_ns - found.since_unix_ns < 300 * 10**9
    assert 500 <= found.rows.num_rows <= 1500
    assert set(found.rows["started_unix_ns"].to_pylist()) <= {row.started_unix_ns for row in rows}
    reader.close()
