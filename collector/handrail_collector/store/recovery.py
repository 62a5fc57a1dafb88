"""Recover what a replay of the journal needs, and handle unlisted files.

A file is unlisted when the manifest does not name it.
A start removes such a file only when it is provably ours and unfinished: a temporary file; a file of the one publish that comes
next after everything listed (its line was never written, so it was never acknowledged as stored, and the journal has its
entries); a fold whose rows all lie in listed files; a rollup, which is made from rows.
Every other file may be the only copy of its rows and is set aside.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from handrail_collector.rows import RequestRow
from handrail_collector.store.layout import SUFFIX, TEMPORARY
from handrail_collector.store.manifest import (
    RESTORE,
    Added,
    PublishRecord,
    StoreDamagedError,
    StoredFile,
    added_by,
    counted,
    files_of,
    observed_by,
)
from handrail_collector.store.quarantine import ADVICE, READ_ERRORS, checked, of_machine
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.requests import request_row
from handrail_collector.store.upgrade import upgraded

log = logging.getLogger(__name__)

RowId = tuple[str, str, int]
"""Identity of a request row: trace_id, request_id, version."""

Read = Callable[[StoredFile], tuple[Path, bytes]]
"""A function that returns the path and bytes of a file. Raises ``OSError``."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """The fields of a published request row on which its counts depend."""

    edge: bool
    complete: bool
    first_token: bool  # its phases sum to the time to first token
    findings: tuple[str, ...] = ()  # one kind per finding

    @classmethod
    def of(cls, row: RequestRow) -> PublishedRow:
        """Extract these fields from ``row``."""
        kinds = tuple(finding.split(":")[0] for finding in row.findings)
        return cls(row.scope == "edge", row.complete, row.phase_of == "ttft", kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store held when it was opened.

    ``end_offset``: journal entries before it have their spans in the store. ``low_water_offset``: where the replay starts.
    ``evidence``: span id to the newest request row that rests on it, for rows that the replay may make again. These rows are
    in the store and must not be published twice, even when a replay opens the same request by another span.
    ``rows``: what was counted of these rows, by trace_id and request_id.
    ``found``: keys of findings that belong to no single request and that the replay may make again.
    ``observed``: counts as of the last publish. ``added``: the sum of what all publishes added.
    """

    end_offset: int
    low_water_offset: int
    evidence: Mapping[str, RowId]
    rows: Mapping[tuple[str, str], PublishedRow] = field(default_factory=dict)
    found: frozenset[str] = frozenset()
    observed: Mapping[str, int] = field(default_factory=dict)
    added: Added = field(default_factory=dict)


def recover(every: Sequence[PublishRecord], shard: int, read: Read) -> Recovered:
    """Collect what the publishes of a manifest say about one shard."""
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
    """Return the offset below which the replay cannot make rows of ``publish`` again.

    Such rows rest on nothing at or after the offset.
    A compacted hour may hold a million rows, and a few late ones among them that the replay can make again.
    """
    return low_water_offset if publish.first_offset < low_water_offset else 0


def _rows(
    publishes: Sequence[PublishRecord], table: Table, offset: str, low_water_offset: int, read: Read
) -> Iterator[Mapping[str, Any]]:
    """Read the rows of one table that rest on an entry at or after the low-water mark.

    Column ``offset`` names the entry of a row.
    """
    for publish in publishes:
        for file in files_of([publish], table):
            found = _table(file, read)
            if found is not None:
                resting_on = _resting_on(publish, low_water_offset)
                yield from found.filter(pc.greater_equal(found[offset], resting_on)).to_pylist()


def _table(file: StoredFile, read: Read) -> pa.Table | None:
    """Read a file; None when it is damaged, because a replay makes its rows again."""
    path, data = read(file)
    try:
        return upgraded(file.table, file.schema, checked(file, data))
    except READ_ERRORS as error:
        if of_machine(error):
            raise
        log.error("%s (%d rows) cannot be read: %s; %s", path, file.rows, error, ADVICE)
        return None


def _newest(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Select the rows that no other row replaces.

    An earlier version carries no information: a row that withdraws it has no evidence, and the request that took its
    place has the same evidence.
    """
    newest: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        if key not in newest or newest[key].version < row.version:
            newest[key] = row
    return sorted(newest.values(), key=lambda row: row.version)


UNLISTED = ".unlisted"
"""Suffix of a file that was set aside; nothing reads it."""

_NAME = re.compile(r"[a-z]+-(?P<shard>\d{3})-(?P<first>\d{20})-(?P<end>\d{20})-(?P<fold>c?)\d{3,}" + re.escape(SUFFIX))


@dataclass(frozen=True, slots=True)
class Unlisted:
    """What a start does with unlisted files; paths are relative to the store's root."""

    remove: tuple[str, ...]
    aside: tuple[str, ...]


def sorted_out(
    unlisted: Collection[str], publishes: Iterable[PublishRecord], rows: Callable[[str], int | None], where: str
) -> Unlisted:
    """Sort unlisted files into those to remove and those to set aside.

    ``unlisted``: files on disk that neither a line nor a head names. ``rows``: rows of a file, None when it is unreadable.
    Raises ``StoreDamagedError`` when files of more than one publish lie beyond the listed ones: then lines are missing.
    """
    known = tuple(publishes)
    ends = _ends(known)
    remove, aside = [], []
    beyond: dict[int, dict[int, list[str]]] = {}
    for path in sorted(unlisted):
        name = _NAME.fullmatch(PurePosixPath(path).name)
        if path.endswith(TEMPORARY) or path.startswith(f"{Table.ROLLUPS.value}/"):
            remove.append(path)
        elif name is None:
            aside.append(path)
        elif name["fold"]:
            (remove if _rows_are_listed(path, name, known, rows) else aside).append(path)
        elif (first := int(name["first"])) >= ends.get(int(name["shard"]), 0):
            beyond.setdefault(int(name["shard"]), {}).setdefault(first, []).append(path)
        else:
            aside.append(path)
    for shard, firsts in beyond.items():
        paths = [path for each in firsts.values() for path in each]
        if len(firsts) > 1:
            raise StoreDamagedError(
                f"{where} ends at offset {ends.get(shard, 0)}, and {counted(len(paths))} of {len(firsts)} later publishes "
                f"exist, such as {paths[-1]}: lines are missing; {RESTORE}"
            )
        remove += paths
    return Unlisted(tuple(remove), tuple(aside))


def _ends(publishes: Iterable[PublishRecord]) -> Mapping[int, int]:
    ends: dict[int, int] = {}
    for publish in publishes:
        ends[publish.shard] = max(publish.end_offset, ends.get(publish.shard, 0))
    return ends


def _rows_are_listed(
    path: str, name: re.Match[str], publishes: Iterable[PublishRecord], rows: Callable[[str], int | None]
) -> bool:
    """Check whether the rows of a fold are still in listed files.

    They are when the listed files of its hour within its range have at least as many rows.
    """
    shard, first, end = (int(name[each]) for each in ("shard", "first", "end"))
    folder = PurePosixPath(path).parent
    within = sum(
        file.rows
        for publish in publishes
        if publish.shard == shard and first <= publish.first_offset and publish.end_offset <= end
        for file in publish.files
        if PurePosixPath(file.path).parent == folder
    )
    found = rows(path)
    return found is not None and found <= within
