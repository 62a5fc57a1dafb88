"""Rows survive JSON; spans are complete in it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings

from builders.store_rows import request_rows as made_rows
from builders.strategies import request_rows, span_rows
from handrail_collector.api.schema import row_from_json, row_to_json, span_from_json, span_to_json
from handrail_collector.rows import RequestRow
from handrail_collector.store.tables.spans import SpanRow


@settings(max_examples=50, deadline=None)
@given(row=request_rows)
def test_a_row_comes_back_from_json(row: RequestRow) -> None:
    assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row


def test_unknown_names_are_ignored() -> None:
    row = made_rows(1)[0]
    assert row_from_json(row_to_json(row) | {"provisional": True, "new": 1}) == row


@pytest.mark.parametrize(
    "wrong",
    [{"phases": None}, {"phases": [{}]}, {"joins": [1]}, {"gap_buckets": 7}, {"findings": 7}],
    ids=["no_phases", "empty_phase", "join", "sketch", "findings"],
)
def test_what_is_no_row_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - base64 has its own message
        row_from_json(row_to_json(made_rows(1)[0]) | wrong)


def test_a_missing_field_is_named() -> None:
    plain = row_to_json(made_rows(1)[0])
    del plain["trace_id"]
    with pytest.raises(ValueError, match="trace_id"):
        row_from_json(plain)


@settings(max_examples=25, deadline=None)
@given(span=span_rows)
def test_a_span_is_whole_in_json(span: SpanRow) -> None:
    plain = json.loads(json.dumps(span_to_json(span)))
    assert set(plain) == {field.name for field in fields(SpanRow)}
    assert (plain["trace_id"], plain["start_unix_ns"]) == (span.trace_id, span.start_unix_ns)
    assert span_from_json(plain | {"new": 1}) == span
