"""Explain made requests through a real store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from builders.request_rows import MS, STARTED
from handrail_collector.explain.period.report import ScopeAnswer, Tail, explain
from handrail_collector.rows import RequestRow
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.period import load_period
from handrail_collector.store.read import StoreReader

WHOLE: Final = PeriodQuery(since_unix_ns=STARTED, until_unix_ns=STARTED + 3_600_000 * MS)


def store_of(root: Path, made: list[RequestRow]) -> StoreReader:
    made = [
        replace(row, version=1, first_offset=at, last_offset=at, request_id=f"{at + 1:016x}", trace_id=f"{at + 1:032x}")
        for at, row in enumerate(made)
    ]
    publisher = StorePublisher(root, now_unix_ns=lambda: STARTED)
    publisher.open()
    publisher.publish(0, len(made), len(made), [], made)
    publisher.close()
    return StoreReader(root, threads=1)


def scope_of(root: Path, made: list[RequestRow]) -> ScopeAnswer:
    reader = store_of(root, made)
    try:
        (scope,) = explain(load_period(reader, WHOLE, fast=False)).scopes
    finally:
        reader.close()
    return scope


def explained_period(tail: Tail | None) -> Tail:
    assert tail is not None
    return tail
