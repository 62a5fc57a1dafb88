"""Query a store from any process: read-only and without locks.

A copied folder works too. The store holds what the manifest names.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import duckdb

from handrail.identity import candidate_keys
from handrail_collector.rows import EventRow, FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import (
    FAILED,
    FETCH_SORTS,
    SORT_FIELDS,
    FetchFilter,
    RequestFilter,
    SampleFilter,
)
from handrail_collector.store.manifest import ManifestReader, StoredFile, files_of
from handrail_collector.store.schema import Table, phase_column
from handrail_collector.store.snapshot import FETCH_MARGIN_NS, REPLAY_MARGIN_NS, Snapshot, Views, live_table
from handrail_collector.store.tables.append_only import FLAT
from handrail_collector.store.tables.requests import request_row, requests_table
from handrail_collector.store.tables.samples import SAMPLED
from handrail_collector.store.tables.spans import SpanRow, span_row

MAX_FOUND: Final = 200
"""Most rows that ``find`` returns."""

NEAR_ROWS: Final = 200_000
"""Number of latest rows that ``near`` searches."""

MIN_PREFIX: Final = 6
"""Shortest prefix that may stand for an id, characters."""

SPAN_MARGIN_NS: Final = 120 * 1_000_000_000
"""Margin before and after a request in which its spans are searched.

It covers clocks of hosts and spans that were sent late.
"""

RECENT_TIMES: Final = 2
"""Factor of rows read over rows wanted: some rows repeat in a later version."""

RECENT: Final = (
    *("started_unix_ns", "trace_id", "request_id", "version", "number", "span_id", "direction", "mode", "connector"),
    *("consumer_instance", "producer_instance", "consumer_host", "producer_host", "consumer_engine_id", "producer_engine_id"),
    *("producer_address", "outcome", "open", "duration_ns", "handshake_ns", "posted_ns", "transfer_ns", "transfer_bound_ns"),
    *("bytes_expected", "bytes_moved", "descriptors", "last_offset"),
)
"""Columns of KV fetches that the findings about the links of a period need."""

_HEX_DIGITS: Final = frozenset("0123456789abcdef")


class StoreReader:
    """Queries of a store; thread-safe, each query blocks its thread.

    Each query raises ``StoreDamagedError`` when the store cannot be read.
    """

    def __init__(self, root: Path, threads: int = 2) -> None:
        self.root = root
        self._manifest = ManifestReader(root)
        self._guard = threading.Lock()  # guards the manifest, the snapshot and the creation of the connection
        self._threads = threads
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._snapshot: Snapshot | None = None

    def close(self) -> None:
        """Close DuckDB. Idempotent."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def snapshot(self) -> Snapshot:
        """Return the present state of the store."""
        with self._guard:
            publishes = self._manifest.publishes()
            if self._snapshot is None or self._snapshot.publishes is not publishes:
                self._snapshot = Snapshot(self.root, publishes, self._connect)
            return self._snapshot

    def requests(self, wanted: RequestFilter, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        """List the requests that match, in the order of the filter.

        Each request appears in its highest version. ``live``: rows that the store does not have yet; of equal versions they win.
        Raises ``ValueError`` for a bad filter.
        """
        _refuse(wanted.validate())
        snapshot = self.snapshot()
        files = snapshot.files(Table.REQUESTS, wanted.since_unix_ns, wanted.until_unix_ns)
        rows: list[RequestRow] = []
        column = SORT_FIELDS.get(wanted.sort) or phase_column(wanted.sort)
        direction = "DESC" if wanted.descending else "ASC"
        order = f"ORDER BY {column} {direction} NULLS LAST, started_unix_ns DESC, trace_id, request_id, version DESC"
        known = _highest(live)
        with snapshot.ask(live={Table.REQUESTS: live_table(known.values(), requests_table)} if known else {}) as views:
            views.request_versions(files)
            parameters = _parameters(wanted)
            offset = 0
            while (missing := wanted.limit - len(rows)) > 0:
                # The sort value of the last row wanted comes first: DuckDB then reads the other columns of few rows.
                last = f"WHERE {column} IS NOT NULL ORDER BY {column} {direction} LIMIT 1 OFFSET {missing + offset - 1}"
                bound = views.value("requests", column, parameters, then=last)
                within = "" if bound is None else f"WHERE {column} {'>=' if wanted.descending else '<='} {bound} "
                page = f"{within}{order} LIMIT {missing} OFFSET {offset}"
                batch = views.rows("requests", _flagged, parameters, then=page)
                rows.extend(_newest(views, snapshot, batch, known))
                offset += len(batch)
                if len(batch) < missing:
                    break
        return rows

    def count(self, wanted: RequestFilter) -> int:
        """Count the requests that match, whatever ``limit`` is.

        Raises ``ValueError`` for a bad filter.
        """
        _refuse(wanted.validate())
        snapshot = self.snapshot()
        with snapshot.ask() as views:
            views.requests(snapshot.files(Table.REQUESTS, wanted.since_unix_ns, wanted.until_unix_ns))
            return int(views.value("requests", "count(*)", _parameters(wanted)))

    def find(self, any_id: str, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        """Find the requests that an id in any form may name, latest first.

        Returns at most ``MAX_FOUND``. An equal id wins over an equal key (``handrail.identity``), and a key over a prefix.
        A response id may be stored as a part of its key. When a row holds the id itself, rows whose response id
        is equal by chance but stored in that form are not searched. ``live``: as for ``requests``.
        """
        snapshot, keys, known = self.snapshot(), candidate_keys(any_id), _highest(live)
        plain = any_id.lower() if _HEX_DIGITS.issuperset(any_id.lower()) else None
        ids: dict[str, object] = {
            "id": any_id,
            "ids": list(dict.fromkeys((any_id, *keys))),
            "span_id": bytes.fromhex(plain) if plain is not None and len(plain) == 16 else None,
            "trace_id": bytes.fromhex(plain) if plain is not None and len(plain) == 32 else None,
            "hex": plain if plain is not None and len(plain) == 32 else None,
            "row_limit": MAX_FOUND,
        }
        for column, digits in (("trace_id", 32), ("request_id", 16)):
            begins = plain is not None and len(plain) <= digits
            ids[f"first_{column}"] = bytes.fromhex(str(plain).ljust(digits, "0")) if begins else None
            ids[f"last_{column}"] = bytes.fromhex(str(plain).ljust(digits, "f")) if begins else None
        with snapshot.ask(live={Table.REQUESTS: live_table(known.values(), requests_table)} if known else {}) as views:
            rows = self._found(views, snapshot, "find_stored", ids, known)
            if any(match(row, any_id, keys) is Match.EQUAL for row in rows):
                return best(rows, any_id)
            for query in ("find_equal", "find_prefix") if len(any_id) >= MIN_PREFIX else ("find_equal",):
                if found := best(self._found(views, snapshot, query, ids, known), any_id):
                    return found
        return []

    def _found(
        self, views: Views, snapshot: Snapshot, query: str, ids: dict[str, object], live: dict[tuple[str, str], RequestRow]
    ) -> list[RequestRow]:
        """Read the rows at the places that ``query`` finds, in their newest version.

        The places come first: DuckDB reads every selected column of every row where a filter has an OR.
        """
        every = snapshot.files(Table.REQUESTS)
        views.request_versions(every, filename=True)
        places = views.rows(query, lambda row: (row["filename"], row["started_unix_ns"]), ids)
        if not places:
            return []
        paths = {path for path, _ in places}
        views.request_versions([file for file in every if str(self.root / file.path) in paths])
        rows = views.rows("requests_at", _flagged, {"times_unix_ns": sorted({started for _, started in places})})
        return _newest(views, snapshot, rows, live)

    def near(self, any_id: str, limit: int = 5) -> list[str]:
        """List ids of recent requests that resemble ``any_id``, the most similar first."""
        snapshot = self.snapshot()
        files: list[StoredFile] = []
        for file in reversed(snapshot.files(Table.REQUESTS)):
            if sum(each.rows for each in files) >= NEAR_ROWS:
                break
            files.append(file)
        with snapshot.ask() as views:
            views.request_versions(files)
            return views.rows("near", lambda row: str(row["id"]), {"id": any_id, "row_limit": limit})

    def spans(self, row: RequestRow) -> list[SpanRow]:
        """List the spans of a request by start: its evidence, and the spans below it.

        Of spans that were sent again with changes, the later one counts.
        """
        snapshot = self.snapshot()
        first = row.started_unix_ns - SPAN_MARGIN_NS
        last = row.started_unix_ns + row.duration_ns + SPAN_MARGIN_NS
        files = [
            file
            for publish in snapshot.publishes
            for file in files_of([publish], Table.SPANS)
            if (file.min_unix_ns <= last and file.max_unix_ns >= first)
            or (publish.first_offset <= row.last_offset and publish.end_offset > row.first_offset)
        ]
        if not files:
            return []
        traces = [bytes.fromhex(trace_id) for trace_id in (row.trace_id, *row.other_trace_ids)]
        with snapshot.ask() as views:
            views.plain(Table.SPANS, files)
            return _of_request(row, views.rows("spans", span_row, {"trace_ids": traces}))

    def fetches(self, wanted: FetchFilter, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        """List the KV fetches that match, in the order of the filter.

        ``live``: as for ``requests``.
        Raises ``ValueError`` for a bad filter.
        """
        _refuse(wanted.validate())
        snapshot = self.snapshot()
        files = snapshot.files(Table.KV_FETCHES, wanted.since_unix_ns, wanted.until_unix_ns, FETCH_MARGIN_NS)
        direction = "DESC" if wanted.descending else "ASC"
        order = f'{FETCH_SORTS[wanted.sort]} {direction} NULLS LAST, started_unix_ns DESC, trace_id, request_id, "number"'
        with snapshot.ask(live=_live(Table.KV_FETCHES, live)) as views:
            views.newest(Table.KV_FETCHES, files)
            then = f"ORDER BY {order} LIMIT {wanted.limit}"
            decode = FLAT[Table.KV_FETCHES].decode
            return views.rows("kv_fetches", decode, _parameters(wanted), then=then)

    def fetches_of(self, row: RequestRow, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        """List the KV fetches of one request, in order."""
        return self._of_row("kv_fetches_of_request", Table.KV_FETCHES, row, live)

    def stalls_of(self, row: RequestRow, live: Sequence[StallRow] = ()) -> list[StallRow]:
        """List the stalls of one request, in order."""
        return self._of_row("stalls_of_request", Table.STALLS, row, live)

    def _of_row(self, query: str, table: Table, row: RequestRow, live: Sequence[Any]) -> list[Any]:
        snapshot, until = self.snapshot(), row.started_unix_ns + row.duration_ns
        files = snapshot.files(table, row.started_unix_ns, until, SPAN_MARGIN_NS + FETCH_MARGIN_NS)
        ids = {"trace_id": bytes.fromhex(row.trace_id), "request_id": bytes.fromhex(row.request_id)}
        own = [each for each in live if (each.trace_id, each.request_id) == (row.trace_id, row.request_id)]
        with snapshot.ask(live=_live(table, own)) as views:
            views.newest(table, files)
            return views.rows(query, FLAT[table].decode, ids)

    def recent_fetches(
        self, since_unix_ns: int, until_unix_ns: int, limit: int, *, peer: str | None = None, live: Sequence[FetchRow] = ()
    ) -> tuple[list[FetchRow], bool]:
        """List the last KV fetches of a period in no order, and whether there are more.

        The rows have the columns ``RECENT`` only. Only the latest files that hold enough rows are opened, so that a query over a
        day does not read all of it.
        """
        snapshot = self.snapshot()
        files = snapshot.files(Table.KV_FETCHES, since_unix_ns, until_unix_ns, FETCH_MARGIN_NS)
        latest: list[StoredFile] = []
        for file in sorted(files, key=lambda file: file.max_unix_ns, reverse=True):
            if sum(each.rows for each in latest if each.min_unix_ns >= since_unix_ns) >= RECENT_TIMES * limit:
                break
            latest.append(file)
        wanted = FetchFilter(peer=peer)
        with snapshot.ask(live=_live(Table.KV_FETCHES, live)) as views:
            within = f"started_unix_ns >= {since_unix_ns} AND started_unix_ns < {until_unix_ns}"
            views.newest(Table.KV_FETCHES, latest, where=within, most=limit, columns=RECENT)
            decode = FLAT[Table.KV_FETCHES].decode
            rows = views.rows("kv_fetches", decode, _parameters(wanted))
            read = int(views.value("kv_fetches", "count(*)", _parameters(FetchFilter()))) if peer else len(rows)
        return rows, read >= limit or len(latest) < len(files)

    def latest(self, table: Table, now_unix_ns: int) -> int | None:
        """Return when the latest row of a table began; None when the table is empty.

        Rows of clocks that are ahead count as of now.
        """
        return max((min(file.max_unix_ns, now_unix_ns) for file in self.snapshot().files(table)), default=None)

    def events(self, table: Table, since_unix_ns: int, until_unix_ns: int, limit: int = 1000) -> list[EventRow]:
        """List rows of an append-only table (``rows.EventRow``), latest first."""
        snapshot = self.snapshot()
        files = snapshot.files(table, since_unix_ns, until_unix_ns)
        period = {"since_unix_ns": since_unix_ns, "until_unix_ns": until_unix_ns}
        if not files:
            return []
        with snapshot.ask() as views:
            views.events(table, files, since_unix_ns, until_unix_ns)
            return views.rows("events", FLAT[table].decode, period | {"row_limit": limit})

    def samples(self, table: Table, wanted: SampleFilter) -> list[Any]:
        """List the samples of one table that match, oldest first.

        Samples that were delivered twice appear once.
        """
        snapshot = self.snapshot()
        files = snapshot.files(table, wanted.since_unix_ns, wanted.until_unix_ns)
        if not files:
            return []
        with snapshot.ask() as views:
            views.samples(table, files, wanted.since_unix_ns, wanted.until_unix_ns, wanted.names)
            found = views.rows("samples_thinned" if wanted.every_ns else "samples", dict, _parameters(wanted))
            return [wanted.reduced(sample) for sample in SAMPLED[table].decode(found)]

    def _connect(self) -> duckdb.DuckDBPyConnection:
        with self._guard:
            if self._connection is None:
                # No extension is ever downloaded: everything that these queries need is built in.
                settings: dict[str, Any] = {"threads": self._threads, "autoinstall_known_extensions": False}
                self._connection = duckdb.connect(":memory:", config=settings)
            return self._connection.cursor()


class Match(IntEnum):
    """How an id matches a row, surest first."""

    EQUAL = 0  # the id is one of the row's ids
    KEY = 1  # a key of the id is one of the row's keys (``handrail.identity.candidate_keys``)
    PREFIX = 2  # one of the row's ids begins with the id


def match(row: RequestRow, any_id: str, keys: tuple[str, ...]) -> Match | None:
    """Return how ``any_id`` matches ``row``; None when it does not.

    ``keys``: the candidate keys of ``any_id``.
    """
    others = [text for text in (row.client_request_id, row.request_key, row.response_id) if text]
    own = (row.trace_id, row.request_id)
    plain = any_id.lower()
    if any_id in others or plain in (*own, *row.other_trace_ids):
        return Match.EQUAL
    if row.request_key in keys or row.client_request_id in keys:
        return Match.KEY
    if len(any_id) >= MIN_PREFIX and (any(t.startswith(any_id) for t in others) or any(t.startswith(plain) for t in own)):
        return Match.PREFIX
    return None


def best(rows: Iterable[RequestRow], any_id: str) -> list[RequestRow]:
    """Select the rows with the surest match, in their order."""
    keys = candidate_keys(any_id)
    fits = [(how, row) for row in rows if (how := match(row, any_id, keys)) is not None]
    surest = min((how for how, _ in fits), default=None)
    return [row for how, row in fits if how is surest]


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _parameters(wanted: RequestFilter | FetchFilter | SampleFilter) -> dict[str, Any]:
    """Return the parameters of the query of a filter."""
    found = asdict(wanted)
    found |= {name: sorted(value) for name, value in found.items() if isinstance(value, frozenset)}
    if isinstance(wanted, FetchFilter):
        found["failures"] = sorted(FAILED)
    return found | {"text": found["text"].lower()} if found.get("text") else found


def _live(table: Table, rows: Sequence[Any]) -> dict[Table, Any]:
    return {table: live_table(rows, FLAT[table].encode)} if rows else {}


def _highest(live: Iterable[RequestRow]) -> dict[tuple[str, str], RequestRow]:
    """Select the highest version of each live request; of equal ones the last."""
    found: dict[tuple[str, str], RequestRow] = {}
    for row in live:
        known = found.get((row.trace_id, row.request_id))
        if known is None or row.version >= known.version:
            found[row.trace_id, row.request_id] = row
    return found


def _newest(
    views: Views, snapshot: Snapshot, rows: Sequence[tuple[RequestRow, bool]], live: dict[tuple[str, str], RequestRow]
) -> list[RequestRow]:
    """Drop the rows that have a later version.

    That version is in another file or among the live rows. ``rows``: each with whether it is live.
    """
    waiting = [row for row, is_live in rows if is_live]
    stored = [row for row, is_live in rows if not is_live]
    near = _files_near(snapshot, waiting, REPLAY_MARGIN_NS)
    latest = views.latest_versions(near, -1, _ids(waiting))
    if stored:
        first, last = min(row.started_unix_ns for row in stored), max(row.started_unix_ns for row in stored)
        files = snapshot.newer_files(snapshot.files(Table.REQUESTS, first, last + 1))
        latest |= views.latest_versions(files, snapshot.base_version, _ids(stored))

    def counts(row: RequestRow, is_live: bool) -> bool:
        known = live.get((row.trace_id, row.request_id))
        newest = latest.get((bytes.fromhex(row.trace_id), bytes.fromhex(row.request_id)), row.version)
        return newest <= row.version and (is_live or known is None or known.version < row.version)

    return [row for row, is_live in rows if counts(row, is_live)]


def _flagged(stored: dict[str, Any]) -> tuple[RequestRow, bool]:
    return request_row(stored), stored["live"]


def _files_near(snapshot: Snapshot, rows: Sequence[RequestRow], margin_ns: int) -> list[StoredFile]:
    if not rows:
        return []
    first, last = min(row.started_unix_ns for row in rows), max(row.started_unix_ns for row in rows)
    return snapshot.files(Table.REQUESTS, first, last + 1, margin_ns)


def _ids(rows: Collection[RequestRow]) -> set[bytes]:
    return {bytes.fromhex(row.request_id) for row in rows}


def _of_request(row: RequestRow, spans: Iterable[SpanRow]) -> list[SpanRow]:
    latest: dict[tuple[str, str], SpanRow] = {}
    for span in spans:
        known = latest.get((span.trace_id, span.span_id))
        if known is None or span.offset >= known.offset:
            latest[span.trace_id, span.span_id] = span
    members = set(row.span_ids)
    below = {span.span_id: span.parent_span_id for span in latest.values()}
    for span_id in below:
        path = []
        at = span_id
        while at in below and at not in members and at not in path:
            path.append(at)
            at = below[at]
        if at in members:
            members.update(path)
    return sorted((s for s in latest.values() if s.span_id in members), key=lambda s: (s.start_unix_ns, s.span_id))
