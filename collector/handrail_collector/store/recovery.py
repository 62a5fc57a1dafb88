"""What a store held when it was opened, as far as a replay of the journal must know it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from handrail_collector.rows import RequestRow
from handrail_collector.store.counter_totals import Added
from handrail_collector.store.manifest import PublishRecord, StoredFile, added_by, files_of, observed_by
from handrail_collector.store.quarantine import ADVICE, READ_ERRORS, checked, of_machine
from handrail_collector.store.request_columns import request_row
from handrail_collector.store.schema import Table

log = logging.getLogger(__name__)

RowId = tuple[str, str, int]
"""trace_id, request_id, version of a request row."""

Read = Callable[[StoredFile], tuple[Path, bytes]]
"""Where a file lies, and its bytes. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """What counts of a request row depend on."""

    edge: bool
    complete: bool
    first_token: bool  # its phases are those of the time to it
    findings: tuple[str, ...] = ()  # kinds, one for each

    @classmethod
    def of(cls, row: RequestRow) -> PublishedRow:
        """Of ``row``."""
        kinds = tuple(finding.split(":")[0] for finding in row.findings)
        return cls(row.scope == "edge", row.complete, row.phase_of == "ttft", kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store held when it was opened.

    ``end_offset``: journal entries before it have their spans in the store. ``low_water_offset``: where the replay starts.
    ``evidence``: span id to the newest request row that rests on it, of those that the replay may make again: they are in the
    store and must not be published twice, though a replay may open the same request by another span. ``rows``: what was counted
    of these rows, by trace_id and request_id. ``found``: keys of the findings of no single request that may be made again.
    ``observed``: counts as of the last publish; ``added``: what all publishes added.
    """

    end_offset: int
    low_water_offset: int
    evidence: Mapping[str, RowId]
    rows: Mapping[tuple[str, str], PublishedRow] = field(default_factory=dict)
    found: frozenset[str] = frozenset()
    observed: Mapping[str, int] = field(default_factory=dict)
    added: Added = field(default_factory=dict)


def recover(every: Sequence[PublishRecord], shard: int, read: Read) -> Recovered:
    """What ``every`` publish in the manifest says of a shard."""
    publishes = [publish for publish in every if publish.shard == shard]
    low_water = max((publish.low_water_offset for publish in publishes), default=0)
    recent = [publish for publish in publishes if publish.end_offset > low_water]
    request_rows = _newest(map(request_row, _rows(recent, Table.REQUESTS, "last_offset", low_water, read)))
    return Recovered(
        end_offset=max((publish.end_offset for publish in publishes), default=0),
        low_water_offset=low_water,
        evidence={span_id: (row.trace_id, row.request_id, row.version) for row in request_rows for span_id in row.span_ids},
        rows={(row.trace_id, row.request_id): PublishedRow.of(row) for row in request_rows},
        found=frozenset(row["key"].hex() for row in _rows(recent, Table.FINDINGS, "offset", low_water, read)),
        observed=observed_by(every, shard),
        added=added_by(every, shard),
    )


def _resting_on(publish: PublishRecord, low_water_offset: int) -> int:
    """Rows of ``publish`` that rest on nothing at or after this offset cannot be made again by the replay.

    A compacted hour may hold a million rows and, of those that came late, a few that can.
    """
    return low_water_offset if publish.first_offset < low_water_offset else 0


def _rows(
    publishes: Sequence[PublishRecord], table: Table, offset: str, low_water_offset: int, read: Read
) -> Iterator[Mapping[str, Any]]:
    """The rows of one table that rest on an entry at the low-water mark or later; column ``offset`` says on which."""
    for publish in publishes:
        for file in files_of([publish], table):
            found = _table(file, read)
            if found is not None:
                resting_on = _resting_on(publish, low_water_offset)
                yield from found.filter(pc.greater_equal(found[offset], resting_on)).to_pylist()


def _table(file: StoredFile, read: Read) -> pa.Table | None:
    """None for a damaged one: a replay makes its rows again."""
    path, data = read(file)
    try:
        return checked(file, data)
    except READ_ERRORS as error:
        if of_machine(error):
            raise
        log.error("%s (%d rows) cannot be read: %s; %s", path, file.rows, error, ADVICE)
        return None


def _newest(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Those that no other replaces. A version that has a later one says nothing: what withdrew it has no evidence, and the
    request that took its place has the same."""
    newest: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in newest or newest[key].version < row.version:
            newest[key] = row
    return sorted(newest.values(), key=lambda row: row.version)
