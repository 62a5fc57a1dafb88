"""Stitch records to rows and store them without the collector's journal.

This serves runs in virtual time, and programs that have records and no OTLP.
The stitcher, the explanation and the store are the collector's. Times are the records' own receive times, so a day takes
seconds and two runs of the same records give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from handrail.records import Iteration, ProcessEvent
from handrail.records.devices import DeviceRun
from handrail_collector.decisions import DecidedRows, Decisions
from handrail_collector.event_rows import MINUTE_NS, clock_rows
from handrail_collector.explain.request.request_row import Fleet
from handrail_collector.explain.stalls.stall_rows import StallDesk
from handrail_collector.rows import MERGED, ClockPairRow, FetchRow, LinkFactRow, RequestRow, StallRow
from handrail_collector.stitch.arrival import AHEAD_NS, latest_of
from handrail_collector.stitch.engine_activity import Activities
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Decision, Stitcher, StitchSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FlatRows
from handrail_collector.store.tables.samples import SampleRow, table_of

ROWS_A_PUBLISH = 20_000

STORE = "store"
"""Name of the store's folder in a data folder."""


def rows_of(
    records: Iterable[tuple[int, Item | Activities]],
    settings: StitchSettings | None = None,
    fetches: list[FetchRow] | None = None,
    stalls: list[StallRow] | None = None,
    clocks: list[ClockPairRow] | None = None,
) -> Iterator[RequestRow]:
    """Yield rows in the order of their decision, with later versions and withdrawals.

    ``records``: each with its receive wall time, in that order. The index of a record is its offset.
    ``fetches``: receives the hand-offs of a request when its row is decided. ``stalls``: receives those of its stream.
    ``clocks``: receives the clock bounds between hosts, once a minute.
    """
    stitcher, decisions = Stitcher(settings), Decisions(StallDesk())

    def decided(due: Iterable[Decision], now: int) -> Iterator[RequestRow]:
        for rows in _decided(stitcher, decisions, due, now):
            if fetches is not None:
                fetches.extend(rows.fetches)
            if stalls is not None:
                stalls.extend(rows.stalls)
            if rows.row is not None:
                yield rows.row
                yield from rows.withdrawn

    swept = 0
    for offset, (received_unix_ns, record) in enumerate(records):
        for second in range(swept + SECOND, received_unix_ns + 1, SECOND) if swept else ():
            yield from decided(stitcher.sweep(second), second)
            swept = second
            if clocks is not None and second // MINUTE_NS != (second - SECOND) // MINUTE_NS:
                clocks.extend(clock_rows(stitcher.clocks.intervals(), second, offset))
        swept = swept or received_unix_ns
        yield from decided(stitcher.advance(received_unix_ns), received_unix_ns)
        if isinstance(record, Activities) and latest_of(record) <= received_unix_ns + AHEAD_NS:
            decisions.desk.activity.take(record)
        if not isinstance(record, Iteration | ProcessEvent | DeviceRun):
            stitcher.add(record, offset, received_unix_ns)
    if clocks is not None and swept:
        clocks.extend(clock_rows(stitcher.clocks.intervals(), swept + MINUTE_NS, offset))
    # Requests that are open at the end: first those that wait for an engine, then those that wait for a decode in vain.
    of = stitcher.settings
    soon = swept + of.engine_wait_ns + of.settle_ns + 2 * SECOND
    for now in (*range(swept + SECOND, soon, SECOND), soon + of.max_open_ns, soon + of.max_open_ns + 2 * SECOND):
        yield from decided(stitcher.sweep(now), now)


def _decided(stitcher: Stitcher, decisions: Decisions, due: Iterable[Decision], now: int) -> Iterator[DecidedRows]:
    for decision in due:
        group = decision.group
        if group.is_request:  # KV without a request has no row to hang on
            reporting = frozenset(stitcher.reporting(min(now, group.deadline_unix_ns or now)))
            yield decisions.rows(group, Fleet(reporting, clocks=stitcher.clocks))


def newest(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Select the last version of each request, without withdrawn requests."""
    last: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in last or last[key].version < row.version:
            last[key] = row
    return [row for row in last.values() if row.version and row.scope != MERGED]


def publish(
    folder: Path,
    rows: Iterable[RequestRow],
    fetches: list[FetchRow] | None = None,
    stalls: list[StallRow] | None = None,
    clocks: list[ClockPairRow] | None = None,
) -> int:
    """Store rows as the collector of the data folder ``folder`` does.

    ``fetches``, ``stalls``, ``clocks``: the lists that ``rows`` fills; they are emptied.
    The store is new, or nothing of it is replayed any more.
    Returns the number of rows, versions included. Raises what ``StorePublisher`` raises.
    """
    publisher = StorePublisher(folder / STORE)
    at = publisher.open().end_offset
    published = 0
    try:
        for batch in _batches(rows):
            end = at + len(batch)
            found = {Table.KV_FETCHES: fetches, Table.STALLS: stalls, Table.CLOCK_PAIRS: clocks}
            flat: FlatRows = {table: list(report) for table, report in found.items() if report}
            publisher.publish(at, end, end, (), batch, flat=flat)
            for report in found.values():
                if report:
                    report.clear()
            at, published = end, published + len(batch)
    finally:
        publisher.close()
    return published


def publish_samples(folder: Path, samples: Iterable[SampleRow], facts: Iterable[LinkFactRow] = ()) -> None:
    """Add samples and link facts from logs to such a store.

    Raises what ``StorePublisher`` raises.
    """
    publisher = StorePublisher(folder / STORE)
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
