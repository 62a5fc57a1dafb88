"""The queries as files run in DuckDB as they are.

sqlglot turns them into ClickHouse's SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import sqlglot
from sqlglot import ErrorLevel, exp

from builders.dataclass_rows import flat_row
from builders.device_samples import S, busy_host, counter, flattened, gauge, port, sample
from builders.engine_samples import engine_sample
from builders.store_rows import START_UNIX_NS, request_rows, spans_of_requests
from handrail.phases import Phase
from handrail.records.devices import runs
from handrail_collector.rows import MERGED
from handrail_collector.store.filters import FetchFilter, PeriodQuery, RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.period import PHASE_SUMS, Measure, load_period
from handrail_collector.store.read import StoreReader
from handrail_collector.store.rollups import NO_ROLLUPS
from handrail_collector.store.schema import Table, phase_column
from handrail_collector.store.snapshot import names, query, run

DOCS = Path(__file__).parents[3] / "docs" / "store.md"
ROWS = [replace(row, version=1) for row in request_rows(40)]
ROWS[3] = replace(ROWS[3], client_request_id="a=b", request_key="k=1", response_id="chatcmpl-x")
PARAMETERS: dict[str, Any] = {
    **dict.fromkeys(("scope", "outcome", "model", "instance", "min_ttft_ns", "finding", "text", "direction", "peer", "hosts")),
    **dict.fromkeys(
        ("failed", "open", "span_id", "hex", "first_request_id", "last_request_id", "first_trace_id", "last_trace_id")
    ),
    "since_unix_ns": START_UNIX_NS - HOUR_NS,
    "until_unix_ns": START_UNIX_NS + 9 * HOUR_NS,
    "id": ROWS[5].client_request_id,
    "ids": [ROWS[5].client_request_id],
    "trace_id": bytes.fromhex(ROWS[5].trace_id),
    "request_id": bytes.fromhex(ROWS[5].request_id),
    "trace_ids": [bytes.fromhex(ROWS[5].trace_id)],
    "request_ids": [bytes.fromhex(ROWS[5].request_id)],
    "times_unix_ns": [ROWS[5].started_unix_ns],
    "failures": ["failed"],
    "ranks": [0.25, 0.5],
    "row_limit": 10,
    "base_version": 0,
    "bins_per_e": 51,
    "sample_every": 1,
    "every_ns": S,
    "idle": 0.01,
}
OF = {"neighbours": {"scope": "edge", "model": "tiny"}}
"""Parameters of one query."""

ADDED = """
CREATE VIEW spans AS FROM read_parquet('store/spans/*/*/*.parquet', union_by_name = true, hive_partitioning = false);
CREATE VIEW iterations AS FROM read_parquet('store/iterations/*/*/*.parquet', hive_partitioning = false);
CREATE VIEW events AS FROM read_parquet('store/process_events/*/*/*.parquet', hive_partitioning = false);
CREATE VIEW samples AS FROM read_parquet('store/link_samples/*/*/*.parquet', union_by_name = true, hive_partitioning = false);
CREATE VIEW gpu_samples AS
SELECT *, 0.5 AS "g.d.tensor_active_ratio", 0.4 AS "g.d.dram_active_ratio", NULL::DOUBLE AS "g.d.sm_active_ratio"
FROM read_parquet('store/gpu_samples/*/*/*.parquet', union_by_name = true, hive_partitioning = false);
CREATE VIEW request_rows AS
SELECT filename, trace_id, request_id, version FROM read_parquet('store/requests/*/*/*.parquet', filename = true);
CREATE VIEW later_rows AS FROM request_rows;
"""
"""Views beside those of docs/store.md."""

FIND = """
CREATE OR REPLACE VIEW requests AS
SELECT *, '' AS filename, request_key AS stored_request_key, response_id AS stored_response_id
FROM read_parquet('store/requests/*/*/*.parquet', union_by_name = true, hive_partitioning = false) WHERE scope <> 'merged'
"""
"""The view of ``find_*.sql``, which look up ids as they are stored."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a data folder with rows in every table."""
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    at = ROWS[5].started_unix_ns
    ids = {"trace_id": ROWS[5].trace_id, "request_id": ROWS[5].request_id, "version": 1, "number": 0}
    links = [sample(port(), at + n * S, gauge("load", n), counter("bytes", n, "receive")) for n in range(3)]
    flat: dict[Table, list[Any]] = {
        Table.KV_FETCHES: [flat_row(Table.KV_FETCHES, 1, at, **ids)],
        Table.STALLS: [flat_row(Table.STALLS, 1, at, **ids)],
        Table.PROCESS_EVENTS: [flat_row(Table.PROCESS_EVENTS, 1, at)],
        Table.ITERATIONS: [flat_row(Table.ITERATIONS, 1, at, full=False)],
        Table.GPU_SAMPLES: runs(flattened(list(busy_host(0.3, gpus=1)))),
        Table.LINK_SAMPLES: runs(links),
        Table.ENGINE_SAMPLES: [engine_sample(0)],
    }
    spans = [replace(span, trace_id=ROWS[5].trace_id) for span in spans_of_requests(1)]
    publisher.publish(0, 10, 10, spans, ROWS, flat=flat)
    later = [replace(ROWS[0], version=2, outcome="aborted"), replace(ROWS[1], version=2, scope=MERGED, phases=(), joins=())]
    publisher.publish(10, 20, 20, [], later)
    publisher.close()
    return tmp_path


@pytest.fixture
def shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a plain DuckDB with the views of docs/store.md, in the data folder."""
    monkeypatch.chdir(folder)
    preamble, *_ = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    thresholds = {"baseline_from_ns": 1, "baseline_to_ns": 10**8, "slow_from_ns": 2 * 10**8}
    with duckdb.connect() as connection:
        connection.execute(preamble + ADDED)
        connection.register("rollups", NO_ROLLUPS)
        rows = [{"scope": "edge", "measure": measure.value, **thresholds} for measure in Measure]
        connection.register("thresholds", pa.Table.from_pylist(rows))
        yield connection


@pytest.mark.parametrize("name", names())
def test_a_query_runs_in_a_plain_duckdb(shell: duckdb.DuckDBPyConnection, name: str) -> None:
    if name.startswith("find_"):
        shell.execute(FIND)
    assert run(shell, name, **PARAMETERS | OF.get(name, {})).num_rows


def test_the_documented_views_hold_what_the_reader_gives(shell: duckdb.DuckDBPyConnection, folder: Path) -> None:
    reader = StoreReader(folder / "store")
    requests = run(shell, "requests", **PARAMETERS)
    stored = {(row.request_id, row.version, row.request_key) for row in reader.requests(RequestFilter(limit=1000))}
    keys = zip(*(requests[name].to_pylist() for name in ("request_id", "version", "request_key")), strict=True)
    assert {(request_id.hex(), version, key) for request_id, version, key in keys} == stored
    assert run(shell, "kv_fetches", **PARAMETERS)["span_id"].to_pylist() == [
        bytes.fromhex(row.span_id) for row in reader.fetches(FetchFilter())
    ]
    period = PeriodQuery(since_unix_ns=PARAMETERS["since_unix_ns"], until_unix_ns=PARAMETERS["until_unix_ns"])
    (scope,) = load_period(reader, period, fast=False).sketches.items()
    gaps = run(shell, "gap_histograms", **PARAMETERS)
    assert (scope[0], scope[1].count) == ("edge", sum(gaps["gaps"].to_pylist()))
    reader.close()


def test_the_documented_statements_run(shell: duckdb.DuckDBPyConnection) -> None:
    _, prepared, histogram = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert shell.execute(prepared).fetchall() == [("tiny",)]
    counts = dict(shell.execute(histogram).fetchall())
    assert sum(counts.values()) == sum(sum(row.gap_counts) for row in ROWS if row != ROWS[1])
    assert query("models").split("SELECT", 1)[1].split() == prepared.split("SELECT", 1)[1].split(";")[0].split()


@pytest.mark.parametrize("name", ["aggregates", "parts", "tail_and_sample", "neighbours", "compared_requests"])
def test_every_phase_is_read(name: str) -> None:
    assert [column for column in PHASE_SUMS if column not in query(name)] == []
    assert {phase_column(phase.value) for phase in Phase} < set(PHASE_SUMS)


ELSEWHERE = {
    "gap_histograms": "two unnest of one row go in step in DuckDB; ClickHouse needs one ARRAY JOIN of both",
    "neighbours": "hash(): another function of the same use in ClickHouse",
    "tail_and_sample": "hash(): as above",
    "quantiles": "quantile_disc of several ranks is quantilesExact there, whose rank is one higher for some counts",
    "samples_thinned": "COLUMNS with a lambda: ClickHouse selects columns by a pattern and has no alias of each",
}
"""Queries whose ClickHouse text parses and means something else; a store on ClickHouse writes these by hand."""


@pytest.mark.parametrize("name", names())
def test_a_query_becomes_clickhouse_sql(name: str) -> None:
    def typed(node: exp.Expression) -> exp.Expression:
        return exp.Placeholder(this=node.name, kind="String") if isinstance(node, exp.Parameter | exp.Placeholder) else node

    tree = sqlglot.parse_one(query(name), read="duckdb")
    text = tree.transform(typed).sql(dialect="clickhouse", unsupported_level=ErrorLevel.RAISE)
    assert sqlglot.parse_one(text, read="clickhouse")
    strange = "COLUMNS(" in text or "PERCENTILE_DISC(" in text or "hash(" in text or text.count("arrayJoin(") > 1
    assert strange == (name in ELSEWHERE)
