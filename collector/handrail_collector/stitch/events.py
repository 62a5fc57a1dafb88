"""Make rows of the append-only tables.

Sources: what sidecars report about engines and processes, and what the collector learns about clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from handrail.clock_offset import OffsetInterval
from handrail.records import EngineSample, Iteration, ProcessEvent
from handrail.records.devices import DeviceRun
from handrail_collector.rows import ClockPairRow, EventRow, FetchRow, FindingRow, IterationRow, ProcessEventRow, StallRow
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FlatRows

MINUTE_NS = 60 * 10**9
HOUR_NS = 60 * MINUTE_NS


def key_of(*parts: object) -> str:
    """Return 16 hex digits that are the same for the same parts."""
    return blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def process_event_row(event: ProcessEvent, offset: int) -> ProcessEventRow:
    """Return ``event`` as a row.

    Reports of one event by several sources stay several rows.
    """
    process = event.process
    return ProcessEventRow(
        at_unix_ns=event.at_unix_ns,
        key=key_of(process.instance, event.at_unix_ns, event.kind.value, event.source.value, event.pid, event.process_kind),
        offset=offset,
        kind=event.kind.value,
        role=process.role.value,
        instance=process.instance,
        host=process.host_name or process.host,
        source=event.source.value,
        engine=event.engine,
        engine_id=event.engine_id,
        pid=event.pid,
        process_kind=event.process_kind,
        detail=event.detail,
        at_bound_ns=event.at_bound_ns,
        count=event.count,
    )


def iteration_row(iteration: Iteration, offset: int) -> IterationRow:
    """Return ``iteration`` as a row."""
    process = iteration.process
    return IterationRow(
        at_unix_ns=iteration.started_unix_ns,
        key=key_of(process.instance, iteration.started_unix_ns, iteration.core, iteration.full),
        offset=offset,
        role=process.role.value,
        instance=process.instance,
        host=process.host_name or process.host,
        engine_id=iteration.engine_id,
        core=iteration.core,
        duration_ns=iteration.duration_ns,
        steps=iteration.steps,
        full=iteration.full,
        busy_ns=iteration.busy_ns,
        longest_ns=iteration.longest_ns,
        longest_at_ns=iteration.longest_at_ns,
        requests=iteration.requests,
        prefill_requests=iteration.prefill_requests,
        prefill_tokens=iteration.prefill_tokens,
        decode_tokens=iteration.decode_tokens,
        preemptions=iteration.preemptions,
        running=iteration.running,
        waiting=iteration.waiting,
        kv_landing_steps=iteration.kv_landing_steps,
        resumed_tokens=iteration.resumed_tokens,
        median_ns=iteration.usual_ns,
    )


def finding_row(kind: str, detail: str, instance: str, peer: str, at_unix_ns: int, offset: int) -> FindingRow:
    """Return the row of a finding that belongs to no single request.

    The same finding has one key an hour, so it is stored once an hour.
    """
    key = key_of(kind, detail, instance, peer, at_unix_ns // HOUR_NS)
    return FindingRow(
        at_unix_ns=at_unix_ns, key=key, offset=offset, kind=kind, detail=detail, instance=instance, peer_instance=peer
    )


def clock_rows(intervals: dict[tuple[str, str], OffsetInterval], at_unix_ns: int, offset: int) -> Iterator[ClockPairRow]:
    """Yield one row a minute for every pair of hosts with a bound."""
    minute = at_unix_ns // MINUTE_NS
    for (a, b), interval in intervals.items():
        if interval.low_ns is not None or interval.high_ns is not None:
            yield ClockPairRow(
                at_unix_ns=minute * MINUTE_NS,
                key=key_of(a, b, minute),
                offset=offset,
                host=a,
                peer_host=b,
                low_ns=interval.low_ns,
                high_ns=interval.high_ns,
            )


class EventRows:
    """Rows of the append-only tables, by table, on their way to the store."""

    def __init__(self) -> None:
        self._rows: dict[Table, list[EventRow | DeviceRun | EngineSample]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, table: Table, row: EventRow | DeviceRun | EngineSample) -> None:
        """Add one row."""
        self._rows.setdefault(table, []).append(row)

    def extend(self, more: EventRows) -> None:
        """Append all rows of ``more``."""
        for table, rows in more._rows.items():
            self._rows.setdefault(table, []).extend(rows)

    def then(self, more: EventRows) -> EventRows:
        """Append all rows of ``more``; return ``self``."""
        self.extend(more)
        return self

    def together_with(self, fetches: Sequence[FetchRow], stalls: Sequence[StallRow]) -> FlatRows:
        """Return all rows to publish, with those of KV fetches and stalls."""
        reports: FlatRows = {Table.KV_FETCHES: fetches, Table.STALLS: stalls}
        return {**self._rows, **{table: rows for table, rows in reports.items() if rows}}
