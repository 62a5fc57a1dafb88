"""Rows and spans survive the way into columns and back.

The way goes through the Parquet file and DuckDB.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders.store_rows import request_rows as made_rows
from builders.store_rows import spans_of_requests
from builders.strategies import INT64, KEYS, VALUES, request_rows, span_rows
from handrail import conventions as names
from handrail.otlp.values import Attributes
from handrail.phases import Phase
from handrail_collector.store.schema import (
    REQUEST_COLUMNS,
    SCHEMA_VERSION,
    SCHEMA_VERSION_KEY,
    TABLE_KEY,
    StoreColumn,
    Table,
    encode,
    phase_column,
)
from handrail_collector.store.tables.requests import (
    pack_ids,
    pack_integers,
    request_row,
    requests_table,
    unpack_ids,
    unpack_integers,
)
from handrail_collector.store.tables.spans import (
    MAX_ATTRIBUTE_COLUMNS,
    SpanRow,
    decode_attribute,
    decode_attributes,
    encode_attributes,
    span_row,
    spans_table,
)


def read_back(data: bytes, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file as DuckDB reads them."""
    file = folder / "file.parquet"
    file.write_bytes(data)
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        cursor = connection.execute("SELECT * FROM read_parquet($file)", {"file": str(file)})
        columns = [column[0] for column in cursor.description or ()]
        return [dict(zip(columns, values, strict=True)) for values in cursor.fetchall()]


def stored_spans(rows: list[SpanRow], folder: Path) -> list[SpanRow]:
    table, columns = spans_table(rows)
    return [span_row(stored) for stored in read_back(encode(table, Table.SPANS, columns), folder)]


def span_with(attributes: Attributes) -> SpanRow:
    return replace(spans_of_requests(1)[0], attributes=attributes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=st.lists(request_rows, max_size=6))
def test_request_rows_come_back(rows: list[Any], tmp_path: Path) -> None:
    data = encode(requests_table(rows), Table.REQUESTS, REQUEST_COLUMNS)
    back = [request_row(stored) for stored in read_back(data, tmp_path)]
    assert back == sorted(rows, key=lambda row: row.started_unix_ns)


@pytest.mark.parametrize("name", ["started_unix_ns", "scope", "outcome", "version"])
def test_a_row_without_a_value_that_every_row_has_is_damaged(name: str) -> None:
    """Such a row comes from DuckDB where one bit of the file turned."""
    (stored,) = requests_table(made_rows(1)).to_pylist()
    with pytest.raises(ValueError, match=f"a damaged row: {name} has no value"):
        request_row({**stored, name: None})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=st.lists(span_rows, min_size=1, max_size=6))
def test_spans_come_back(rows: list[SpanRow], tmp_path: Path) -> None:
    assert _sorted(stored_spans(rows, tmp_path)) == _sorted(rows)


def _sorted(rows: Iterable[SpanRow]) -> list[SpanRow]:
    return sorted(rows, key=lambda row: (row.trace_id, row.span_id, repr(row)))


def test_a_file_says_its_schema_version() -> None:
    data = encode(requests_table([]), Table.REQUESTS, REQUEST_COLUMNS)
    metadata = pq.read_metadata(io.BytesIO(data)).metadata
    assert metadata == {SCHEMA_VERSION_KEY.encode(): str(SCHEMA_VERSION).encode(), TABLE_KEY.encode(): b"requests"}


def test_every_phase_has_a_column() -> None:
    assert {phase_column(phase.value) for phase in Phase} <= {column.name for column in REQUEST_COLUMNS}


def test_a_phase_outside_the_enum_is_refused() -> None:
    row = made_rows(1)[0]
    wrong = replace(row, phases=(replace(row.phases[0], phase="prefil_queue"),))
    with pytest.raises(ValueError, match="prefil_queue"):
        requests_table([wrong])


def test_two_phases_of_one_name_keep_their_own_times_and_the_column_has_the_sum() -> None:
    row = made_rows(1)[0]
    row = replace(row, phases=(*row.phases, replace(row.phases[6], process="path", duration_ns=7)))
    (stored,) = requests_table([row]).to_pylist()
    assert stored["phase_unattributed_ns"] == row.phases[6].duration_ns + 7
    assert request_row(stored) == row


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.latency.e2e": 0.25, "gen_ai.latency.time_to_first_token": 0.25},
        {"gen_ai.latency.e2e": 1, "gen_ai.latency.time_to_first_token": 1.0},
        {"gen_ai.latency.e2e": -0.0, "gen_ai.latency.time_to_first_token": 0.0},
        {"gen_ai.latency.e2e": "1", "gen_ai.latency.time_to_first_token": "1"},
        {
            "gen_ai.latency.time_in_model_prefill": 0.1,
            "gen_ai.latency.time_in_model_decode": 0.2,
            "gen_ai.latency.time_in_model_inference": 0.1 + 0.2,
        },
        {
            "gen_ai.latency.time_in_model_prefill": float("nan"),
            "gen_ai.latency.time_in_model_decode": -0.5,
            "gen_ai.latency.time_in_model_inference": float("inf"),
        },
        {names.REQUEST_ID: "r", names.REQUEST_KEY: "r", names.JOIN_KEY: "r"},
        {names.REQUEST_ID: "r", names.JOIN_KEY: "r"},
        {names.REQUEST_KEY: "k", names.JOIN_KEY: "k"},
        {names.REQUEST_ID: "r", names.REQUEST_KEY: "", names.JOIN_KEY: ""},
        {"Model": "a", "model": "b"},
        {"a": None, "b": {}, "c": (), "d": b"", "e": "", "f": False},
    ],
    ids=repr,
)
def test_attributes_come_back_with_type_and_sign(attributes: Attributes, tmp_path: Path) -> None:
    rows = [span_with(attributes), span_with({}), span_with(dict.fromkeys(attributes, 5))]
    assert sorted(repr(sorted(r.attributes.items())) for r in stored_spans(rows, tmp_path)) == sorted(
        repr(sorted(r.attributes.items())) for r in rows
    )


def test_a_peer_with_endless_keys_gets_a_bounded_number_of_columns(tmp_path: Path) -> None:
    rows = [span_with({f"key{index}": index, "common": index}) for index in range(3 * MAX_ATTRIBUTE_COLUMNS)]
    table, columns = spans_table(rows)
    assert sum(name.startswith("a.") for name in table.column_names) == MAX_ATTRIBUTE_COLUMNS
    assert "a.i.common" in table.column_names
    back = stored_spans(rows, tmp_path)
    assert sorted(r.attributes["common"] for r in back if isinstance(r.attributes["common"], int)) == list(range(len(rows)))
    assert all(len(row.attributes) == 2 for row in back)
    assert len({column.name for column in columns if isinstance(column, StoreColumn)}) == len(columns)


@given(values=st.lists(INT64 | st.integers(), max_size=20))
def test_packed_integers_come_back(values: list[int]) -> None:
    assert unpack_integers(pack_integers(values)) == values


def test_a_packed_integer_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="cut off"):
        unpack_integers(pack_integers([300])[:-1])


@given(ids=st.lists(st.binary(min_size=8, max_size=8).map(bytes.hex), max_size=6))
def test_packed_ids_come_back(ids: list[str]) -> None:
    assert unpack_ids(pack_ids(ids), 8) == tuple(ids)


@given(value=VALUES)
def test_attribute_json_comes_back_with_types(value: Any) -> None:
    assert repr(decode_attribute(encode_attributes(value))) == repr(value)


@given(value=st.dictionaries(KEYS, VALUES, max_size=3))
def test_maps_come_back(value: Any) -> None:
    assert decode_attributes(encode_attributes(value)) == value


@pytest.mark.parametrize("text", ["[1", "[]", '{"$new":1}'], ids=["broken", "no_map", "unknown_tag"])
def test_what_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kinds of wrong text have different messages
        decode_attributes(text)
