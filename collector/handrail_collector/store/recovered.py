"""What a store held when it was opened, as far as a replay of the journal must know it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handrail_collector.rows import RequestRow
from handrail_collector.stitch.group import AMBIGUOUS
from handrail_collector.store.damaged import ADVICE
from handrail_collector.store.manifest import Publish, StoredFile, observed_by
from handrail_collector.store.request_columns import request_row
from handrail_collector.store.schema import Table

log = logging.getLogger(__name__)

RowId = tuple[str, str, int]
"""trace_id, request_id, version of a request row."""

Read = Callable[[StoredFile], tuple[Path, bytes]]
"""Where a file lies, and its bytes. Raises ``OSError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store held when it was opened.

    ``end_offset``: journal entries before it have their spans in the store. ``low_water_offset``: where the replay starts.
    ``evidence``: span id to the newest request row that rests on it, of those that the replay may make again: they are in the
    store and must not be published twice, though a replay may open the same request by another span. ``edges``: of these, the
    rows of an edge, by trace_id and request_id, and whether they were complete; ``ambiguous``: how much evidence each of them
    says to be ambiguous, where it says so. ``observed``: counts as of the last publish.
    """

    end_offset: int
    low_water_offset: int
    evidence: Mapping[str, RowId]
    edges: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    ambiguous: Mapping[tuple[str, str], int] = field(default_factory=dict)
    observed: Mapping[str, int] = field(default_factory=dict)


def recover(every: Sequence[Publish], shard: int, read: Read) -> Recovered:
    """What ``every`` publish in the manifest says of a shard."""
    publishes = [publish for publish in every if publish.shard == shard]
    low_water = max((publish.low_water_offset for publish in publishes), default=0)
    recent = [
        row
        for publish in publishes
        if publish.end_offset > low_water
        for file in publish.files
        if file.table is Table.REQUESTS
        for row in _rows(file, _resting_on(publish, low_water), read)
    ]
    told = _newest(recent)
    return Recovered(
        end_offset=max((publish.end_offset for publish in publishes), default=0),
        low_water_offset=low_water,
        evidence={span_id: (row.trace_id, row.request_id, row.version) for row in told for span_id in row.span_ids},
        edges={(row.trace_id, row.request_id): row.complete for row in told if row.scope == "edge"},
        ambiguous={(row.trace_id, row.request_id): count for row in told if (count := ambiguous_findings(row))},
        observed=observed_by(every, shard),
    )


def ambiguous_findings(row: RequestRow) -> int:
    """How much evidence it says to fit several requests."""
    return sum(finding.split(":")[0] == AMBIGUOUS for finding in row.findings)


def _resting_on(publish: Publish, low_water_offset: int) -> int:
    """Rows of ``publish`` that rest on nothing at or after this offset cannot be made again by the replay.

    A compacted hour may hold a million rows and, of those that came late, a few that can.
    """
    return low_water_offset if publish.first_offset < low_water_offset else 0


def _rows(file: StoredFile, resting_on: int, read: Read) -> list[RequestRow]:
    """The rows of one file that rest on an entry at ``resting_on`` or later; a replay makes those of a damaged one again."""
    path, data = read(file)
    try:
        table = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        log.error("%s (%d rows) cannot be read: %s; %s", path, file.rows, error, ADVICE)
        return []
    return list(map(request_row, table.filter(pc.greater_equal(table["last_offset"], resting_on)).to_pylist()))


def _newest(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Those that no other replaces. A version that has a later one says nothing: what withdrew it has no evidence, and the
    request that took its place has the same."""
    newest: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in newest or newest[key].version < row.version:
            newest[key] = row
    return sorted(newest.values(), key=lambda row: row.version)
