"""List what happened to the engines, from the two tables that hold it."""

from __future__ import annotations

from typing import Final

from handrail_collector.api.events import Happened, HappenedFilter
from handrail_collector.rows import FindingRow, ProcessEventRow
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

DAY_NS: Final = 24 * 3600 * 10**9
MOST: Final = 10_000


def happened(reader: StoreReader, wanted: HappenedFilter, now_unix_ns: int) -> list[Happened]:
    """List stored events, latest first."""
    until = wanted.until_unix_ns if wanted.until_unix_ns is not None else now_unix_ns + DAY_NS
    since = wanted.since_unix_ns if wanted.since_unix_ns is not None else min(now_unix_ns, until) - DAY_NS
    rows = [row for table in (Table.PROCESS_EVENTS, Table.FINDINGS) for row in reader.events(table, since, until, MOST)]
    found = [_of(row) for row in rows if isinstance(row, ProcessEventRow | FindingRow)]
    fitting = [one for one in found if wanted.instance is None or wanted.instance in (one.instance, one.peer_instance)]
    return sorted(fitting, key=lambda one: (-one.at_unix_ns, one.instance, one.kind))[: wanted.limit]


def _of(row: ProcessEventRow | FindingRow) -> Happened:
    if isinstance(row, FindingRow):
        return Happened(
            at_unix_ns=row.at_unix_ns,
            kind=row.kind,
            finding=True,
            instance=row.instance,
            detail=row.detail,
            peer_instance=row.peer_instance,
        )
    return Happened(
        at_unix_ns=row.at_unix_ns,
        kind=row.kind,
        finding=False,
        instance=row.instance,
        detail=row.detail,
        role=row.role,
        host=row.host,
        source=row.source,
        process_kind=row.process_kind,
        pid=row.pid,
        at_bound_ns=row.at_bound_ns,
        count=row.count,
    )
