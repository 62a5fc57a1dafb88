"""Records straight to rows and to a store, by the clock at which they came: the collector's stitching without its journal.

For runs in virtual time, and for whatever else has records and not OTLP. The stitcher, the explanation and the store are the
collector's; times are the records' own, so a day takes seconds and two runs of the same records give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from handrail_collector.explain.request import Fleet, explain_all
from handrail_collector.pipeline import numbered, withdrawn, withdrawn_fetches
from handrail_collector.rows import MERGED, FetchRow, LinkFactRow, RequestRow
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Decision, Stitcher, StitchSettings
from handrail_collector.store.flat import FlatRows
from handrail_collector.store.publish import Publisher
from handrail_collector.store.samples import SampleRow, table_of
from handrail_collector.store.schema import Table

ROWS_A_PUBLISH = 20_000

STORE = "store"
"""The store's folder in a data folder."""


def rows_of(
    records: Iterable[tuple[int, Item]], settings: StitchSettings | None = None, fetches: list[FetchRow] | None = None
) -> Iterator[RequestRow]:
    """Rows in the order in which they are decided, later versions and withdrawals included.

    ``records``: each with the wall time at which it was received, in that order. A record's place among them is its offset.
    ``fetches``: gets the hand-offs of a request when its row is decided.
    """
    stitcher = Stitcher(settings)
    swept = 0
    for offset, (received_unix_ns, record) in enumerate(records):
        for second in range(swept + SECOND, received_unix_ns + 1, SECOND) if swept else ():
            yield from _rows(stitcher, stitcher.sweep(second), second, fetches)
            swept = second
        swept = swept or received_unix_ns
        yield from _rows(stitcher, stitcher.advance(received_unix_ns), received_unix_ns, fetches)
        stitcher.add(record, offset, received_unix_ns)
    yield from _end(stitcher, swept, fetches)


def _end(stitcher: Stitcher, swept: int, fetches: list[FetchRow] | None) -> Iterator[RequestRow]:
    """What is open when nothing comes any more: whatever waits for an engine, then what waits for a decode in vain."""
    settings = stitcher.settings
    soon = swept + settings.engine_wait_ns + settings.settle_ns + 2 * SECOND
    for now in (*range(swept + SECOND, soon, SECOND), soon + settings.max_open_ns, soon + settings.max_open_ns + 2 * SECOND):
        yield from _rows(stitcher, stitcher.sweep(now), now, fetches)


def _rows(stitcher: Stitcher, decisions: Iterable[Decision], now: int, fetches: list[FetchRow] | None) -> Iterator[RequestRow]:
    for decision in decisions:
        group = decision.group
        if not group.is_request:
            continue
        reporting = frozenset(stitcher.reporting(min(now, group.deadline_unix_ns or now)))
        explained = explain_all(group, Fleet(reporting, clocks=stitcher.clocks))
        row = explained.row
        if row is None:
            continue
        if fetches is not None:
            fetches.extend(numbered(explained.fetches, row))
        told = {(trace_id, request_id): version for trace_id, request_id, version in group.superseded}
        group.superseded.clear()
        told.pop((row.trace_id, row.request_id), None)
        yield row
        yield from (withdrawn(row, *earlier, version) for earlier, version in sorted(told.items()))
        if fetches is not None:
            fetches.extend(withdrawn_fetches(row, *earlier, version) for earlier, version in sorted(told.items()))


def newest(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """The last version of each request, without those that were withdrawn."""
    last: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in last or last[key].version < row.version:
            last[key] = row
    return [row for row in last.values() if row.version and row.scope != MERGED]


def publish(folder: Path, rows: Iterable[RequestRow], fetches: list[FetchRow] | None = None) -> int:
    """Store them as the collector of the data folder ``folder`` would; the number of rows, versions included.

    ``fetches``: the list that ``rows`` fills as it goes; it is emptied.

    The store is a new one, or one of which nothing is replayed any more. Raises what ``Publisher`` raises.
    """
    publisher = Publisher(folder / STORE)
    at = publisher.open().end_offset
    published = 0
    try:
        for batch in _batches(rows):
            end = at + len(batch)
            flat: FlatRows = {Table.KV_FETCHES: list(fetches)} if fetches else {}
            publisher.publish(at, end, end, (), batch, flat=flat)
            if fetches:
                fetches.clear()
            at, published = end, published + len(batch)
    finally:
        publisher.close()
    return published


def publish_samples(folder: Path, samples: Iterable[SampleRow], facts: Iterable[LinkFactRow] = ()) -> None:
    """Put samples, and what was logged of links, into such a store, beside what is there. Raises what ``Publisher`` raises."""
    publisher = Publisher(folder / STORE)
    at = publisher.open().end_offset
    flat: dict[Table, list[Any]] = {Table.LINK_FACTS: list(facts)} if facts else {}
    for row in samples:
        flat.setdefault(table_of(row), []).append(row)
    try:
        publisher.publish(at, at, at, (), (), flat=flat)
    finally:
        publisher.close()


def _batches(rows: Iterable[RequestRow]) -> Iterator[list[RequestRow]]:
    batch: list[RequestRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_A_PUBLISH:
            yield batch
            batch = []
    if batch:
        yield batch
