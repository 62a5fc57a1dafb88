"""A store in memory that shows what the storage battery demands.

It is as simple as possible, without files and without SQL.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from doubles.store_filters import fetch_matches, fetch_order, matches, newest_version, order, sample_matches, thinned
from handrail.records.devices import DeviceRun, DeviceSample
from handrail_collector.rows import MERGED, FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import FetchFilter, RequestFilter, SampleFilter
from handrail_collector.store.manifest import Added, added_up
from handrail_collector.store.read import best
from handrail_collector.store.recovery import PublishedRow, Recovered
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FlatRows
from handrail_collector.store.tables.samples import SAMPLED
from handrail_collector.store.tables.spans import SpanRow


@dataclass(slots=True)
class Kept:
    """The stored state that outlives its writer."""

    end_offset: int = 0
    low_water_offset: int = 0
    rows: list[tuple[int, RequestRow]] = field(default_factory=list)  # with the end offset of the range that held them
    spans: list[SpanRow] = field(default_factory=list)
    observed: dict[str, int] = field(default_factory=dict)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fetches: list[FetchRow] = field(default_factory=list)
    samples: dict[Table, list[Any]] = field(default_factory=dict)
    stalls: list[StallRow] = field(default_factory=list)


class MemoryWriter:
    """The memory store's ``StoreWriter``."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def open(self) -> Recovered:
        kept = self._kept
        recent = _newest([row for end, row in kept.rows if end > kept.low_water_offset])
        request_rows = sorted(recent, key=lambda row: row.version)
        return Recovered(
            end_offset=kept.end_offset,
            low_water_offset=kept.low_water_offset,
            evidence={span_id: (row.trace_id, row.request_id, row.version) for row in request_rows for span_id in row.span_ids},
            rows={(row.trace_id, row.request_id): PublishedRow.of(row) for row in request_rows},
            observed=dict(kept.observed),
            added=dict(kept.added),
        )

    def publish(
        self,
        first_offset: int,
        end_offset: int,
        low_water_offset: int,
        spans: Sequence[SpanRow],
        requests: Sequence[RequestRow],
        observed: Mapping[str, int] | None = None,
        flat: FlatRows | None = None,
        added: Added | None = None,
    ) -> None:
        kept = self._kept
        if not kept.end_offset <= first_offset <= end_offset or not kept.low_water_offset <= low_water_offset <= end_offset:
            raise ValueError("offsets out of order")
        kept.end_offset, kept.low_water_offset = end_offset, low_water_offset
        kept.rows += [(end_offset, row) for row in requests]
        kept.spans += spans
        kept.observed = dict(observed or kept.observed)
        kept.added = added_up([kept.added, added or {}])
        kept.fetches += (flat or {}).get(Table.KV_FETCHES, ())
        kept.stalls += (flat or {}).get(Table.STALLS, ())
        for table in SAMPLED:
            for row in (flat or {}).get(table, ()):
                kept.samples.setdefault(table, []).extend(row.samples() if isinstance(row, DeviceRun) else (row,))

    def close(self) -> None:
        """Do nothing: the writer holds no resource."""


class MemoryReader:
    """The memory store's ``StoreQueries``."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def _rows(self, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        return [row for row in _newest([*(row for _, row in self._kept.rows), *live]) if row.scope != MERGED]

    def _fitting(self, wanted: RequestFilter, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        if problems := wanted.validate():
            raise ValueError("; ".join(problems))
        return sorted((row for row in self._rows(live) if matches(wanted, row)), key=lambda row: order(wanted, row))

    def requests(self, wanted: RequestFilter, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        return self._fitting(wanted, live)[: wanted.limit]

    def count(self, wanted: RequestFilter) -> int:
        return len(self._fitting(wanted))

    def find(self, any_id: str, live: Sequence[RequestRow] = ()) -> list[RequestRow]:
        return best(sorted(self._rows(live), key=lambda row: -row.started_unix_ns), any_id)

    def near(self, any_id: str, limit: int = 5) -> list[str]:
        ids = {i for r in self._rows() for i in (r.client_request_id, r.response_id, r.trace_id, r.request_id) if i}
        return difflib.get_close_matches(any_id, sorted(ids), limit)

    def spans(self, row: RequestRow) -> list[SpanRow]:
        latest: dict[tuple[str, str], SpanRow] = {}
        for span in sorted(self._kept.spans, key=lambda span: span.offset):
            if span.trace_id in (row.trace_id, *row.other_trace_ids):
                latest[span.trace_id, span.span_id] = span
        members, grown = set(row.span_ids), 0
        while grown != len(members):
            grown = len(members)
            members |= {span.span_id for span in latest.values() if span.parent_span_id in members}
        return sorted((s for s in latest.values() if s.span_id in members), key=lambda s: (s.start_unix_ns, s.span_id))

    def fetches(self, wanted: FetchFilter, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        if problems := wanted.validate():
            raise ValueError("; ".join(problems))
        found = [row for row in newest_version([*self._kept.fetches, *live]) if fetch_matches(wanted, row)]
        return sorted(found, key=lambda row: fetch_order(wanted, row))[: wanted.limit]

    def fetches_of(self, row: RequestRow, live: Sequence[FetchRow] = ()) -> list[FetchRow]:
        own = (row.trace_id, row.request_id)
        found = [f for f in newest_version([*self._kept.fetches, *live]) if (f.trace_id, f.request_id) == own and f.number >= 0]
        return sorted(found, key=lambda fetch: fetch.number)

    def stalls_of(self, row: RequestRow, live: Sequence[StallRow] = ()) -> list[StallRow]:
        own = (row.trace_id, row.request_id)
        found = [s for s in newest_version([*self._kept.stalls, *live]) if (s.trace_id, s.request_id) == own and s.number >= 0]
        return sorted(found, key=lambda stall: stall.number)

    def samples(self, table: Table, wanted: SampleFilter) -> list[Any]:
        found = {_place(sample): sample for sample in self._kept.samples.get(table, ()) if sample_matches(wanted, sample)}
        fitting = sorted(map(wanted.reduced, found.values()), key=_place)
        return thinned(fitting, wanted.since_unix_ns, wanted.every_ns) if wanted.every_ns else fitting

    def close(self) -> None:
        """Do nothing: the reader holds no resource."""


def _place(sample: Any) -> tuple[int, str, str, str]:
    whose = sample.device.key if isinstance(sample, DeviceSample) else ""
    return sample.at_unix_ns, sample.process.host, sample.process.instance, whose


def _newest(rows: Sequence[RequestRow]) -> list[RequestRow]:
    newest: dict[tuple[str, str], RequestRow] = {}
    for row in rows:
        known = newest.get((row.trace_id, row.request_id))
        if known is None or row.version >= known.version:
            newest[row.trace_id, row.request_id] = row
    return list(newest.values())
