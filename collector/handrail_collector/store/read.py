"""Query a store from any process: read-only and without locks.

A copied folder works too. The store holds what the manifest names.
Files are selected by their times and offsets before DuckDB opens any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from handrail.identity import candidate_keys
from handrail_collector.rows import MERGED, EventRow, FetchRow, RequestRow, StallRow
from handrail_collector.store import fetch_sql, sample_sql, sql
from handrail_collector.store.fetch_filter import FetchFilter
from handrail_collector.store.filter import RequestFilter
from handrail_collector.store.manifest import ManifestReader, PublishRecord, StoreDamagedError, StoredFile, files_of, locate
from handrail_collector.store.match import MIN_PREFIX, Match, best, match
from handrail_collector.store.quarantine import ADVICE, QUERY_ERRORS, refusal
from handrail_collector.store.request_columns import request_row
from handrail_collector.store.sample_filter import SampleFilter
from handrail_collector.store.samples import SAMPLED
from handrail_collector.store.schema import Table
from handrail_collector.store.span import SpanRow
from handrail_collector.store.span_columns import span_row
from handrail_collector.store.tables.dataclass_table import FLAT

T = TypeVar("T")

MAX_FOUND = 200
"""Most rows that ``find`` returns."""

NEAR_ROWS = 200_000
"""Number of latest rows that ``near`` searches."""

SPAN_MARGIN_NS = 120 * 1_000_000_000
"""Margin before and after a request in which its spans are searched.

It covers clocks of hosts and spans that were sent late.
"""

RECENT_TIMES = 2
"""Factor of rows read over rows wanted: some rows repeat in a later version."""

FETCH_MARGIN_NS = 3_600_000_000_000
"""Largest distance between the starts of two versions of a hand-off."""

VERSION_MARGIN_NS = 24 * 3_600_000_000_000
"""Largest distance between the starts of two versions of a row.

Evidence with another clock may open the later version.
"""


class StoreReader:
    """Queries of a store; thread-safe, each query blocks its thread.

    Each query raises ``StoreDamagedError`` when the store cannot be read.
    """

    def __init__(self, root: Path, threads: int = 2) -> None:
        self._root = root
        self._manifest = ManifestReader(root)
        self._guard = threading.Lock()  # guards the manifest and the creation of the connection
        self._threads = threads
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    def root(self) -> Path:
        """The store's folder."""
        return self._root

    def close(self) -> None:
        """Close DuckDB. Idempotent."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def publishes(self) -> tuple[PublishRecord, ...]:
        """List everything published so far, oldest first."""
        with self._guard:
            return self._manifest.publishes()

    def requests(self, wanted: RequestFilter) -> list[RequestRow]:
        """List the requests that match, in the order of the filter.

        Each request appears in its highest version. Raises ``ValueError`` for a bad filter.
        """
        every = self._files(Table.REQUESTS)
        files = _in_time(every, wanted)
        rows: list[RequestRow] = []
        offset = 0
        while (missing := wanted.limit - len(rows)) > 0:
            bound = next(iter(self._fetch(sql.bound(wanted, missing + offset), files, _number)), None)
            batch = self._fetch(sql.requests(wanted, missing, offset, bound), files, request_row)
            rows.extend(self._newest(batch, every))
            offset += len(batch)
            if len(batch) < missing:
                break
        return rows

    def count(self, wanted: RequestFilter) -> int:
        """Count the requests that match, whatever ``limit`` is.

        Raises ``ValueError`` for a bad filter.
        """
        every = self._files(Table.REQUESTS)
        files = _in_time(every, wanted)
        if not files:
            return 0
        times = min(f.min_unix_ns for f in files), max(f.max_unix_ns for f in files)
        newer, base = newer_files(every, *times)
        found = sum(self._fetch(sql.count(wanted), files, _number))
        return found - sum(self._fetch(sql.count_superseded(wanted, base), files, _number, newer))

    def find(self, any_id: str) -> list[RequestRow]:
        """Find the requests that an id in any form may name, latest first.

        Returns at most ``MAX_FOUND``. An equal id wins over an equal key (``handrail.identity``), and a key over a prefix.
        A response id may be stored as a part of its key. When a row holds the id itself, rows whose response id
        is equal by chance but stored in that form are not searched.
        """
        every, keys = self._files(Table.REQUESTS), candidate_keys(any_id)
        rows = self._found(sql.find_stored(any_id, keys, MAX_FOUND), every)
        if any(match(row, any_id, keys) is Match.EQUAL for row in rows):
            return best(rows, any_id)
        queries = [sql.find_equal(any_id, keys, MAX_FOUND)]
        if len(any_id) >= MIN_PREFIX:
            queries.append(sql.find_prefix(any_id, MAX_FOUND))
        return next((found for query in queries if (found := best(self._found(query, every), any_id))), [])

    def _found(self, query: sql.SqlQuery, every: Sequence[StoredFile]) -> list[RequestRow]:
        """Read the rows at the places that ``query`` finds, in their newest version."""
        places = self._fetch(query, every, lambda stored: (stored["filename"], stored["started_unix_ns"]))
        paths = {path for path, _ in places}
        files = [file for file, path in zip(every, self._paths(every), strict=True) if path in paths]
        rows = self._fetch(sql.started([time for _, time in places]), files, request_row) if places else []
        return [row for row in self._newest(rows, every) if row.scope != MERGED]

    def near(self, any_id: str, limit: int = 5) -> list[str]:
        """List ids of recent requests that resemble ``any_id``, the most similar first."""
        files: list[StoredFile] = []
        rows = 0
        for file in reversed(self._files(Table.REQUESTS)):
            if rows >= NEAR_ROWS:
                break
            files.append(file)
            rows += file.rows
        return self._fetch(sql.near(any_id, limit), files, lambda stored: str(stored["id"]))

    def spans(self, row: RequestRow) -> list[SpanRow]:
        """List the spans of a request by start: its evidence, and the spans below it.

        Of spans that were sent again with changes, the later one counts.
        """
        first = row.started_unix_ns - SPAN_MARGIN_NS
        last = row.started_unix_ns + row.duration_ns + SPAN_MARGIN_NS
        files = [
            file
            for publish in self.publishes()
            for file in files_of([publish], Table.SPANS)
            if (file.min_unix_ns <= last and file.max_unix_ns >= first)
            or (publish.first_offset <= row.last_offset and publish.end_offset > row.first_offset)
        ]
        traces = [bytes.fromhex(trace_id) for trace_id in (row.trace_id, *row.other_trace_ids)]
        return _of_request(row, self._fetch(sql.spans(traces), files, span_row))

    def fetches(self, wanted: FetchFilter) -> list[FetchRow]:
        """List the hand-offs that match, in the order of the filter.

        Raises ``ValueError`` for a bad filter.
        """
        if problems := wanted.validate():
            raise ValueError("; ".join(problems))
        files = _near_time(self._files(Table.KV_FETCHES), wanted.since_unix_ns, wanted.until_unix_ns, FETCH_MARGIN_NS)
        return self._fetch(fetch_sql.fetches(wanted), files, FLAT[Table.KV_FETCHES].decode)

    def fetches_of(self, row: RequestRow) -> list[FetchRow]:
        """List the hand-offs of one request, in order."""
        until = row.started_unix_ns + row.duration_ns
        files = _near_time(self._files(Table.KV_FETCHES), row.started_unix_ns, until, SPAN_MARGIN_NS + FETCH_MARGIN_NS)
        query = fetch_sql.of_request(bytes.fromhex(row.trace_id), bytes.fromhex(row.request_id))
        return self._fetch(query, files, FLAT[Table.KV_FETCHES].decode)

    def stalls_of(self, row: RequestRow) -> list[StallRow]:
        """List the stalls of one request, in order."""
        until = row.started_unix_ns + row.duration_ns
        files = _near_time(self._files(Table.STALLS), row.started_unix_ns, until, SPAN_MARGIN_NS + FETCH_MARGIN_NS)
        query = fetch_sql.of_request(bytes.fromhex(row.trace_id), bytes.fromhex(row.request_id))
        return self._fetch(query, files, FLAT[Table.STALLS].decode)

    def recent_fetches(self, since_unix_ns: int, until_unix_ns: int, limit: int) -> tuple[list[FetchRow], bool]:
        """List the last hand-offs of a period in no order, and whether there are more.

        The rows have the columns of ``fetch_sql.RECENT`` only.
        Only the latest files that hold enough rows are opened, so that a query over a day does not read all of it.
        """
        files = _near_time(self._files(Table.KV_FETCHES), since_unix_ns, until_unix_ns, FETCH_MARGIN_NS)
        latest: list[StoredFile] = []
        for file in sorted(files, key=lambda file: file.max_unix_ns, reverse=True):
            if sum(each.rows for each in latest if each.min_unix_ns >= since_unix_ns) >= RECENT_TIMES * limit:
                break
            latest.append(file)
        rows = self._fetch(fetch_sql.recent(since_unix_ns, until_unix_ns, limit), latest, FLAT[Table.KV_FETCHES].decode)
        return rows, len(rows) >= limit or len(latest) < len(files)

    def latest(self, table: Table, now_unix_ns: int) -> int | None:
        """Return when the latest row of a table began; None when the table is empty.

        Rows of clocks that are ahead count as of now.
        """
        return max((min(file.max_unix_ns, now_unix_ns) for file in self._files(table)), default=None)

    def events(self, table: Table, since_unix_ns: int, until_unix_ns: int, limit: int = 1000) -> list[EventRow]:
        """List rows of an append-only table (``rows.EventRow``), latest first."""
        files = _near_time(self._files(table), since_unix_ns, until_unix_ns, 0)
        return self._fetch(fetch_sql.events(since_unix_ns, until_unix_ns, limit), files, FLAT[table].decode)

    def samples(self, table: Table, wanted: SampleFilter) -> list[Any]:
        """List the samples of one table that match, oldest first.

        Samples that were delivered twice appear once.
        """
        files = _near_time(self._files(table), wanted.since_unix_ns, wanted.until_unix_ns, 0)
        if not files:
            return []
        query = sample_sql.samples(table, wanted, self.columns(files))
        return [wanted.reduced(sample) for sample in SAMPLED[table].decode(self._fetch(query, files, dict))]

    def rows(self, files: Sequence[StoredFile], query: sql.SqlQuery) -> list[tuple[Any, ...]]:
        """Run ``query`` over files of one table; empty when there are no files."""
        return self._fetch(query, files, lambda stored: tuple(stored.values()))

    def columns(self, files: Sequence[StoredFile]) -> list[str]:
        """List the columns of all these files together."""
        cursor = self.cursor()
        try:
            cursor.execute(sample_sql.KNOWN.text.replace("{table}", _relation("files", files)), {"files": self._paths(files)})
            return [column[0] for column in cursor.description or ()]
        except QUERY_ERRORS as error:
            raise refusal(error, self._root, files) from error
        finally:
            cursor.close()

    def _files(self, table: Table) -> list[StoredFile]:
        return files_of(self.publishes(), table)

    def _newest(self, rows: Sequence[RequestRow], every: Sequence[StoredFile]) -> list[RequestRow]:
        """Drop the rows that have a higher version in ``every``."""
        if not rows:
            return []
        newer, base = newer_files(every, min(r.started_unix_ns for r in rows), max(r.started_unix_ns for r in rows))
        query = sql.newest_versions(sorted({bytes.fromhex(row.request_id) for row in rows}), base)
        newest = {
            (trace_id, request_id): version
            for trace_id, request_id, version in self._fetch(query, newer, lambda stored: tuple(stored.values()))
        }
        return [
            row
            for row in rows
            if newest.get((bytes.fromhex(row.trace_id), bytes.fromhex(row.request_id)), row.version) == row.version
        ]

    def _fetch(
        self,
        query: sql.SqlQuery,
        files: Sequence[StoredFile],
        made: Callable[[dict[str, Any]], T],
        newer: Sequence[StoredFile] = (),
    ) -> list[T]:
        """Run ``query`` and build each row with ``made``; empty when there are no files."""
        if not files or ("{newer}" in query.text and not newer):
            return []
        parameters: dict[str, object] = {**query.parameters, "files": self._paths(files)}
        text = query.text.replace("{table}", _relation("files", files, query.with_file))
        if newer:
            parameters["newer_files"] = self._paths(newer)
            text = text.replace("{newer}", _relation("newer_files", newer))
        cursor = self.cursor()
        try:
            cursor.execute(text, parameters)
            names = [column[0] for column in cursor.description or ()]
            return [made(dict(zip(names, values, strict=True))) for values in cursor.fetchall()]
        except ValueError as error:
            raise self._damaged(error) from error
        except QUERY_ERRORS as error:
            raise refusal(error, self._root, [*files, *newer]) from error
        finally:
            cursor.close()

    def _damaged(self, error: Exception) -> StoreDamagedError:
        what = str(error).partition("\n")[0]  # this part names the file; the rest is the text of the query
        return StoreDamagedError(f"{self._root}: {what}; {ADVICE}")

    def paths(self, files: Iterable[StoredFile]) -> list[Path]:
        """Return the paths of files of the store.

        Raises ``StoreDamagedError`` when a link leads to one.
        """
        return locate(self._root, (file.path for file in files))

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Open a DuckDB connection for one query; the caller closes it."""
        with self._guard:
            if self._connection is None:
                # No extension is ever downloaded: everything that these queries need is built in.
                settings: dict[str, Any] = {"threads": self._threads, "autoinstall_known_extensions": False}
                self._connection = duckdb.connect(":memory:", config=settings)
            return self._connection.cursor()

    def _paths(self, files: Iterable[StoredFile]) -> list[str]:
        return [str(path) for path in self.paths(files)]


def _relation(parameter: str, files: Sequence[StoredFile], with_file: bool = False) -> str:
    # Union by name takes twice the time for many files. Spans may always differ, requests after an upgrade.
    by_name = len({file.columns_crc for file in files}) > 1
    options = {"hive_partitioning": False, "union_by_name": by_name, "filename": with_file}
    return f"read_parquet(${parameter}, {', '.join(f'{name} = {str(on).lower()}' for name, on in options.items())})"


def _in_time(files: Sequence[StoredFile], wanted: RequestFilter) -> list[StoredFile]:
    """Select the files that may hold rows that match.

    Raises ``ValueError`` for a bad filter.
    """
    if problems := wanted.validate():
        raise ValueError("; ".join(problems))
    return [
        file
        for file in files
        if (wanted.since_unix_ns is None or file.max_unix_ns >= wanted.since_unix_ns)
        and (wanted.until_unix_ns is None or file.min_unix_ns < wanted.until_unix_ns)
    ]


def _near_time(files: Iterable[StoredFile], since: int | None, until: int | None, margin_ns: int) -> list[StoredFile]:
    """Select files that hold rows of this time, or newer versions of such rows.

    A newer version starts within ``margin_ns`` of the time.
    """
    return [
        file
        for file in files
        if (since is None or file.max_unix_ns >= since - margin_ns) and (until is None or file.min_unix_ns < until + margin_ns)
    ]


def newer_files(every: Sequence[StoredFile], first_unix_ns: int, last_unix_ns: int) -> tuple[list[StoredFile], int]:
    """Select files that may hold later versions of rows that started in this time.

    Also returns the lowest version of the store.
    """
    base = min((file.min_version for file in every), default=0)
    first, last = first_unix_ns - VERSION_MARGIN_NS, last_unix_ns + VERSION_MARGIN_NS
    return [f for f in every if f.max_version > base and f.max_unix_ns >= first and f.min_unix_ns <= last], base


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


def _number(stored: dict[str, Any]) -> int:
    (value,) = stored.values()
    return int(value)
