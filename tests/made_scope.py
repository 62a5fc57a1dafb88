"""What is explained of made requests: through a real store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from handrail_collector.explain.period import ScopeAnswer, Tail, explain
from handrail_collector.rows import RequestRow
from handrail_collector.store.ask import ask
from handrail_collector.store.cells import Scoped
from handrail_collector.store.publish import Publisher
from handrail_collector.store.read import StoreReader
from made_rows import MS, STARTED

WHOLE: Final = Scoped(since_unix_ns=STARTED, until_unix_ns=STARTED + 3_600_000 * MS)


def store_of(root: Path, made: list[RequestRow]) -> StoreReader:
    made = [
        replace(row, version=1, first_offset=at, last_offset=at, request_id=f"{at + 1:016x}", trace_id=f"{at + 1:032x}")
        for at, row in enumerate(made)
    ]
    publisher = Publisher(root, now_unix_ns=lambda: STARTED)
    publisher.open()
    publisher.publish(0, len(made), len(made), [], made)
    publisher.close()
    return StoreReader(root, threads=1)


def scope_of(root: Path, made: list[RequestRow]) -> ScopeAnswer:
    reader = store_of(root, made)
    try:
        (scope,) = explain(ask(reader, WHOLE, fast=False)).scopes
    finally:
        reader.close()
    return scope


def told(tail: Tail | None) -> Tail:
    assert tail is not None
    return tail
