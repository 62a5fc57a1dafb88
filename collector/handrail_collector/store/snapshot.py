"""A consistent read view of a store: one state of its manifest.

A query is a file ``queries/<name>.sql`` over views that are named like the tables. ``Snapshot`` makes the views: it selects files
by the manifest's times before DuckDB opens any, takes the newest version of each row, adds the rows that the store does not have
yet, and reads files of earlier schema versions. Every error of a damaged file becomes ``StoreDamagedError``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa

from handrail_collector.rows import MERGED
from handrail_collector.store import upgrade
from handrail_collector.store.layout import HOUR_NS, hour_of
from handrail_collector.store.manifest import PublishRecord, StoreDamagedError, StoredFile, files_of, locate
from handrail_collector.store.quarantine import ADVICE, QUERY_ERRORS, columns_crc, refusal
from handrail_collector.store.schema import REQUEST_COLUMNS, ROLLUP_COLUMNS, StoreColumn, Table
from handrail_collector.store.tables.append_only import FLAT
from handrail_collector.store.tables.samples import SAMPLED, SERIES_COLUMNS, is_series, name_of

T = TypeVar("T")

VERSION_MARGIN_NS: Final = 24 * HOUR_NS
"""Largest distance between the starts of two versions of a request.

Evidence with another clock may open the later version.
"""

REPLAY_MARGIN_NS: Final = HOUR_NS
"""Largest distance between the starts of a row that is not stored yet and of a stored version that is as new."""

FETCH_MARGIN_NS: Final = HOUR_NS
"""Largest distance between the starts of two versions of a KV fetch or a stall."""

LIVE: Final = "live_"
"""Prefix of the relation with the rows of a table that are not stored yet."""

COLUMNS: Final[Mapping[Table, Sequence[StoreColumn]]] = {
    Table.REQUESTS: REQUEST_COLUMNS,
    Table.ROLLUPS: ROLLUP_COLUMNS,
    **{name: kind.columns for name, kind in FLAT.items()},
}
"""Columns of the tables whose files all have the same ones; a file may be too old to have them all."""

_KEY: Final = (
    # The common case comes first: columns of only '=' are one dictionary entry, and DuckDB skips the other branches.
    "CASE WHEN request_key = '=' THEN coalesce(client_request_id, '')"
    " WHEN starts_with(request_key, '\\') THEN substr(request_key, 2)"
    " ELSE replace(request_key, '=', coalesce(client_request_id, '')) END"
)
_RESPONSE: Final = (
    "CASE WHEN starts_with(response_id, '\\') THEN substr(response_id, 2)"
    f" ELSE replace(response_id, '=', coalesce({_KEY}, '')) END"
)
_IDS: Final = (
    f"REPLACE ({_KEY} AS request_key, {_RESPONSE} AS response_id),"
    " request_key AS stored_request_key, response_id AS stored_response_id"
)
"""Ids as they were; a file keeps only the part that differs from another id (``tables/requests.py``)."""


class Snapshot:
    """The store as of one state of its manifest.

    ``connect`` opens a new DuckDB connection for each query.
    """

    def __init__(
        self, root: Path, publishes: tuple[PublishRecord, ...], connect: Callable[[], duckdb.DuckDBPyConnection]
    ) -> None:
        self.root = root
        self.publishes = publishes
        self._connect = connect
        self._superseded: dict[frozenset[str], pa.Table] = {}

    def files(self, table: Table, since: int | None = None, until: int | None = None, margin_ns: int = 0) -> list[StoredFile]:
        """List the files with rows of [since, until), oldest publish first.

        ``margin_ns``: how far apart two versions of a row may start.
        """
        return [
            file
            for file in files_of(self.publishes, table)
            if (since is None or file.max_unix_ns >= since - margin_ns)
            and (until is None or file.min_unix_ns < until + margin_ns)
        ]

    def newer_files(self, files: Sequence[StoredFile]) -> list[StoredFile]:
        """List the files that may hold later versions of the requests in ``files``.

        Two files with a rollup hold no versions of one request (``rollups.py``), and a compacted one holds one version of each.
        """
        first = min((file.min_unix_ns for file in files), default=0) - VERSION_MARGIN_NS
        last = max((file.max_unix_ns for file in files), default=0) + VERSION_MARGIN_NS
        settled = self.rolled if all(file.path in self.rolled for file in files) else {}
        return [
            file
            for file in files_of(self.publishes, Table.REQUESTS)
            if file.max_version > self.base_version
            and file.max_unix_ns >= first
            and file.min_unix_ns <= last
            and not (file.path in settled and file.is_compacted)
        ]

    @cached_property
    def base_version(self) -> int:
        """The lowest version of a request in the store."""
        return min((file.min_version for file in files_of(self.publishes, Table.REQUESTS)), default=0)

    @cached_property
    def rolled(self) -> Mapping[str, StoredFile]:
        """The rollup of each file of requests that has one, by the path of that file."""
        return covered(files_of(self.publishes, Table.ROLLUPS))

    @contextmanager
    def ask(self, *, live: Mapping[Table, pa.Table] | None = None) -> Iterator[Views]:
        """Open views for the queries of one question.

        ``live``: encoded rows that the store does not have yet.
        Raises ``StoreDamagedError`` when a file that a query needs cannot be read.
        """
        cursor = self._connect()
        views = Views(self, cursor)
        try:
            for table, rows in (live or {}).items():
                views.register(f"{LIVE}{table.value}", rows)
            yield views
        except QUERY_ERRORS as error:
            raise refusal(error, self.root, views.used) from error
        except (OSError, ValueError) as error:
            what = str(error).partition("\n")[0]  # this part names the file; the rest is the text of the query
            raise StoreDamagedError(f"{self.root}: {what}; {ADVICE}") from error
        finally:
            cursor.close()

    def superseded(self, files: Sequence[StoredFile]) -> pa.Table:
        """Return the rows of ``files`` that later versions replace or withdraw.

        A row is its file, ids and version. There are few or none.
        """
        key = frozenset(file.path for file in files)
        if key not in self._superseded:
            self._superseded[key] = self.replaced(files, self.newer_files(files))
        return self._superseded[key]

    def replaced(self, files: Sequence[StoredFile], newer: Sequence[StoredFile]) -> pa.Table:
        """Return the rows of ``files`` that a version in ``newer`` replaces.

        A withdrawal is a version too. The columns are those of ``superseded``.
        """
        if not files or not newer:
            return Views.no_keys()
        with self.ask() as views:
            views.bind("request_rows", views.keys(files))
            views.bind("later_rows", views.keys(newer))
            return views.table("superseded", base_version=self.base_version)


class Views:
    """Views of one question, on one DuckDB connection."""

    def __init__(self, snapshot: Snapshot, cursor: duckdb.DuckDBPyConnection) -> None:
        self.used: list[StoredFile] = []  # the files of all views
        self._snapshot = snapshot
        self._cursor = cursor
        self._live: set[str] = set()
        self._upgrades = False

    # --- queries ---------------------------------------------------------------------------------------------------------

    def table(self, name: str, **parameters: object) -> pa.Table:
        """Run ``queries/<name>.sql``; sums come as 64-bit integers."""
        return run(self._cursor, name, **parameters)

    def batches(self, name: str, rows: int, **parameters: object) -> Iterator[pa.RecordBatch]:
        """Run ``queries/<name>.sql`` and yield its rows in batches."""
        yield from self._cursor.sql(query(name), params=_used(query(name), parameters)).to_arrow_reader(rows)

    def rows(
        self, name: str, made: Callable[[dict[str, Any]], T], parameters: Mapping[str, object], *, then: str = ""
    ) -> list[T]:
        """Run ``queries/<name>.sql`` and build each row with ``made``.

        ``then``: an ending, such as ``ORDER BY``. Raises ``StoreDamagedError`` when a row lacks a column:
        the footer of its file is damaged.
        """
        text = f"SELECT * FROM (\n{query(name)}\n) {then}" if then else query(name)
        self._cursor.execute(text, _used(text, parameters))
        names = [column[0] for column in self._cursor.description or ()]
        found = [dict(zip(names, values, strict=True)) for values in self._cursor.fetchall()]
        try:
            return [made(row) for row in found]
        except (KeyError, TypeError) as error:
            raise refusal(error, self._snapshot.root, self.used) from error

    def value(self, name: str, selected: str, parameters: Mapping[str, object], *, then: str = "") -> Any:
        """Compute one value of the rows of ``queries/<name>.sql``.

        Returns None when there is no row.
        """
        text = f"SELECT {selected} FROM (\n{query(name)}\n) {then}"
        found = self._cursor.execute(text, _used(text, parameters)).fetchone()
        return None if found is None else found[0]

    # --- views -----------------------------------------------------------------------------------------------------------

    def bind(self, name: str, relation: str) -> None:
        """Define the view ``name``."""
        self._cursor.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {relation}")

    def register(self, name: str, rows: pa.Table) -> None:
        """Make an Arrow table a relation."""
        self._cursor.register(name, rows)
        self._live.add(name)

    def requests(self, files: Sequence[StoredFile]) -> None:
        """Bind ``requests`` to the newest version of each request in ``files``.

        Withdrawn requests are omitted.
        """
        superseded = self._snapshot.superseded(files)
        relation = self._stored(Table.REQUESTS, files)
        if superseded.num_rows:
            # Only files with such rows are joined: a join over all rows reads and compares the ids of each.
            touched = set(superseded["filename"].to_pylist())
            clean = [file for file in files if str(self._snapshot.root / file.path) not in touched]
            rest = [file for file in files if file not in clean]
            self.register("superseded_rows", superseded)
            relation = (
                f"({self._stored(Table.REQUESTS, clean)} UNION ALL SELECT * FROM {self._stored(Table.REQUESTS, rest)} AS stored"
                " WHERE NOT EXISTS (SELECT 1 FROM superseded_rows AS gone WHERE gone.request_id = stored.request_id"
                " AND gone.trace_id = stored.trace_id AND gone.version = stored.version))"
            )
        self.bind("requests", f"SELECT * {_IDS} FROM {relation} WHERE scope <> '{MERGED}'")

    def request_versions(self, files: Sequence[StoredFile], *, filename: bool = False) -> None:
        """Bind ``requests`` to every version in ``files`` and every live row.

        ``latest_versions`` selects those of a result that count.
        Column ``live``: the store does not have the row yet.

        So a list costs one look-up of its rows instead of a join over all rows: 0.03 s instead of 0.3 s for a million requests.
        """
        relation = self._with_live(Table.REQUESTS, files, filename=filename)
        self.bind("requests", f"SELECT * {_IDS} FROM {relation} WHERE scope <> '{MERGED}'")

    def latest_versions(self, files: Sequence[StoredFile], base: int, ids: Collection[bytes]) -> dict[tuple[bytes, bytes], int]:
        """Return the highest version above ``base`` of each request in ``files``.

        The key is trace id and request id.
        """
        if not files or not ids:
            return {}
        self.bind("later_rows", self.keys(files))
        found = self.rows("latest_versions", lambda row: row, {"base_version": base, "request_ids": sorted(ids)})
        return {(row["trace_id"], row["request_id"]): row["version"] for row in found}

    def newest(
        self,
        table: Table,
        files: Sequence[StoredFile],
        *,
        where: str = "TRUE",
        most: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Bind ``kv_fetches`` or ``stalls`` to each request's highest version.

        Each number occurs once.
        Live rows win over stored ones of their version.
        ``where``, ``most``: only the last of these rows. ``columns``: only these.
        """
        selected = "*" if columns is None else _listed((*columns, "live"))
        relation = f"SELECT {selected} FROM {self._with_live(table, files)} WHERE {where}"
        if most is not None:
            relation += f" ORDER BY started_unix_ns DESC LIMIT {most}"
        self.bind(
            table.value,
            f"SELECT * EXCLUDE (live) FROM ({relation}) QUALIFY version = max(version) OVER (PARTITION BY trace_id, request_id)"
            ' AND row_number() OVER (PARTITION BY trace_id, request_id, version, "number" ORDER BY live DESC, last_offset DESC)'
            ' = 1 AND "number" >= 0',
        )

    def events(self, table: Table, files: Sequence[StoredFile], since: int, until: int) -> None:
        """Bind ``events``: rows of an append-only table of [since, until), each key once."""
        once = 'QUALIFY row_number() OVER (PARTITION BY key ORDER BY "offset" DESC) = 1'
        self.bind("events", f"SELECT * FROM {self._stored(table, files)} WHERE {_between(since, until)} {once}")

    def samples(self, table: Table, files: Sequence[StoredFile], since: int, until: int, names: Collection[str] | None) -> None:
        """Bind ``samples`` to those of [since, until), each once.

        ``names``: the counters whose series it has.
        """
        kind = SAMPLED[table]
        known = self._known(files)
        own = [column.name for column in (*kind.own, *SERIES_COLUMNS) if column.name in known]
        series = [name for name in known if is_series(name) and (names is None or name_of(name) in names)]
        once = f"QUALIFY row_number() OVER (PARTITION BY {_listed((*kind.by, kind.time))}) = 1"
        read = f"SELECT {_listed([*own, *series])} FROM {self._parquet(files)} WHERE {_between(since, until)} {once}"
        # one empty column of each kind: ``samples_thinned.sql`` names columns by pattern, and one must match
        self.bind("samples", f'SELECT *, NULL::BIGINT AS "c.i.", NULL::DOUBLE AS "g.d." FROM ({read})')

    def plain(self, table: Table, files: Sequence[StoredFile], needed: Mapping[str, str] | None = None) -> None:
        """Bind a table as it is stored.

        ``needed``: columns that it must have, and their types; NULL where no file has one.
        """
        if table in COLUMNS:
            self.bind(table.value, f"SELECT * FROM {self._stored(table, files)}")
            return
        known = self._known(files)
        missing = "".join(f', NULL::{kind} AS "{name}"' for name, kind in (needed or {}).items() if name not in known)
        self.bind(table.value, f"SELECT *{missing} FROM {self._parquet(files)}")

    def keys(self, files: Sequence[StoredFile]) -> str:
        """Return a relation of the ids and versions of requests, and their files."""
        if not files:
            return "(SELECT '' AS filename, ''::BLOB AS trace_id, ''::BLOB AS request_id, 0 AS version WHERE FALSE)"
        return f"(SELECT filename, trace_id, request_id, version FROM {self._parquet(files, filename=True)})"

    @staticmethod
    def no_keys() -> pa.Table:
        """Return no row of ``keys``."""
        kinds = {"filename": pa.string(), "trace_id": pa.binary(), "request_id": pa.binary(), "version": pa.int32()}
        return pa.schema(list(kinds.items())).empty_table()

    def _with_live(self, table: Table, files: Sequence[StoredFile], *, filename: bool = False) -> str:
        stored = f"SELECT *, FALSE AS live FROM {self._stored(table, files, filename=filename)}"
        if f"{LIVE}{table.value}" not in self._live:
            return f"({stored})"
        return f"({stored} UNION ALL SELECT *{', NULL AS filename' if filename else ''}, TRUE AS live FROM {LIVE}{table.value})"

    def _stored(self, table: Table, files: Sequence[StoredFile], *, filename: bool = False) -> str:
        """Return a relation of the rows of ``files`` with all columns of ``table``."""
        outdated = [file for file in files if upgrade.is_outdated(table, file.schema)]
        current = [file for file in files if file not in outdated] if outdated else files
        parts = [self._columns(table, part, filename, old) for part, old in ((current, False), (outdated, True)) if part]
        if not parts:
            nothing = ", ".join(f'NULL::{_type(column.type)} AS "{column.name}"' for column in COLUMNS[table])
            parts = [f"SELECT {nothing}{', NULL::VARCHAR AS filename' if filename else ''} WHERE FALSE"]
        return f"({' UNION ALL '.join(parts)})"

    def _columns(self, table: Table, files: Sequence[StoredFile], filename: bool, outdated: bool) -> str:
        columns = COLUMNS[table]
        relation = self._parquet(files, filename=filename)
        if all(file.columns_crc == _crc(table) for file in files):
            return f"SELECT {_listed([column.name for column in columns])}{', filename' if filename else ''} FROM {relation}"
        known = self._known(files)
        renamed = upgrade.expressions(table, known) if outdated else {}
        if renamed and not self._upgrades:
            upgrade.add_functions(self._cursor)
            self._upgrades = True
        selected = [
            f'"{column.name}"'
            if column.name in known
            else f'{renamed.get(column.name, f"NULL::{_type(column.type)}")} AS "{column.name}"'
            for column in columns
        ]
        return f"SELECT {', '.join(selected)}{', filename' if filename else ''} FROM {relation}"

    def _known(self, files: Sequence[StoredFile]) -> list[str]:
        """List the columns of all these files together."""
        if not files:
            return []
        self._cursor.execute(f"SELECT * FROM {self._parquet(files)} LIMIT 0")
        return [column[0] for column in self._cursor.description or ()]

    def _parquet(self, files: Sequence[StoredFile], *, filename: bool = False) -> str:
        self.used.extend(files)
        listed = ", ".join(
            "'" + str(path).replace("'", "''") + "'" for path in locate(self._snapshot.root, (f.path for f in files))
        )
        # union by name takes twice the time for many files, so it is used only where columns differ
        by_name = str(len({file.columns_crc for file in files}) > 1).lower()
        return (
            f"read_parquet([{listed}], hive_partitioning = false, union_by_name = {by_name}, filename = {str(filename).lower()})"
        )


@dataclass(frozen=True, slots=True)
class Split:
    """The files that answer a period.

    ``rollups`` answer for whole hours, ``requests`` for the rest.
    """

    rollups: tuple[StoredFile, ...]
    requests: tuple[StoredFile, ...]


def covered(files: Iterable[StoredFile]) -> dict[str, StoredFile]:
    """Map the path of each covered file to its rollup.

    A rollup of an earlier schema version is made again.
    """
    return {f.covers: f for f in files if f.table is Table.ROLLUPS and not upgrade.is_outdated(f.table, f.schema)}


def split(files: Iterable[StoredFile], since_unix_ns: int, until_unix_ns: int, by_rows: Collection[str] = ()) -> Split:
    """Select the files that answer for [since, until).

    Rollups answer for an hour when each of its files has one and lies within the period.
    ``by_rows``: paths of files of requests whose rollups are ignored.
    """
    files = tuple(files)
    covers = {path: file for path, file in covered(files).items() if path not in by_rows}
    hours: dict[int, list[StoredFile]] = {}
    for file in files:
        if file.table is Table.REQUESTS and file.max_unix_ns >= since_unix_ns and file.min_unix_ns < until_unix_ns:
            hours.setdefault(hour_of(file.path), []).append(file)
    rollups: list[StoredFile] = []
    requests: list[StoredFile] = []
    for each in hours.values():
        whole = all(f.path in covers and f.min_unix_ns >= since_unix_ns and f.max_unix_ns < until_unix_ns for f in each)
        if whole:
            rollups.extend(covers[file.path] for file in each)
        else:
            requests.extend(each)
    return Split(tuple(rollups), tuple(requests))


def run(connection: duckdb.DuckDBPyConnection, name: str, **parameters: object) -> pa.Table:
    """Run ``queries/<name>.sql`` over the relations of a connection.

    Sums come as 64-bit integers.
    """
    found = connection.sql(query(name), params=_used(query(name), parameters)).to_arrow_table()
    return found.cast(pa.schema([(each.name, _narrow(each.type)) for each in found.schema]))


@cache
def query(name: str) -> str:
    """Return the text of ``queries/<name>.sql``."""
    return resources("handrail_collector.store.queries").joinpath(f"{name}.sql").read_text("utf-8")


def names() -> list[str]:
    """List the names of all queries."""
    found = resources("handrail_collector.store.queries").iterdir()
    return sorted(each.name.removesuffix(".sql") for each in found if each.name.endswith(".sql"))


def live_table(rows: Iterable[T], encode: Callable[[Sequence[T]], pa.Table]) -> pa.Table:
    """Encode rows that are not stored yet.

    Rows that the store cannot hold are omitted.
    """
    rows = list(rows)
    try:
        return encode(rows)
    except (ValueError, pa.ArrowException):
        return encode([row for row in rows if _fits(row, encode)])


def _fits(row: T, encode: Callable[[Sequence[T]], pa.Table]) -> bool:
    try:
        encode([row])
    except (ValueError, pa.ArrowException):
        return False
    return True


def _used(text: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """Select the parameters that the text names; DuckDB refuses others."""
    return {name: value for name, value in parameters.items() if re.search(rf"\${name}\b", text)}


@cache
def _crc(table: Table) -> int:
    return columns_crc([column.name for column in COLUMNS[table]])


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_type(kind.value_type)}[]"
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return "BLOB"
    return {"string": "VARCHAR", "int64": "BIGINT", "int32": "INTEGER", "bool": "BOOLEAN", "double": "DOUBLE"}[str(kind)]


def _narrow(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_narrow(kind.value_type))
    return pa.int64() if pa.types.is_decimal(kind) else kind


def _between(since: int, until: int) -> str:
    return f"at_unix_ns >= {since} AND at_unix_ns < {until}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)
