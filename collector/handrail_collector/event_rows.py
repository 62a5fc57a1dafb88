"""Make rows of the append-only tables.

Sources: what sidecars report about engines and processes, and what the collector learns about clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from hashlib import blake2b
from typing import Any, Final, TypeVar

from handrail.clock_offset import OffsetInterval
from handrail.records import Iteration, ProcessEvent
from handrail_collector.rows import ClockPairRow, FindingRow, IterationRow, ProcessEventRow

MINUTE_NS = 60 * 10**9
HOUR_NS = 60 * MINUTE_NS

_Row = TypeVar("_Row", IterationRow, ProcessEventRow)
_FIELDS: Final = {
    row: {field.name for field in fields(row)} & {field.name for field in fields(record)}
    for row, record in ((IterationRow, Iteration), (ProcessEventRow, ProcessEvent))
}
"""The fields that a row has from its record."""


def key_of(*parts: object) -> str:
    """Return 16 hex digits that are the same for the same parts."""
    return blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def process_event_row(event: ProcessEvent, offset: int) -> ProcessEventRow:
    """Return ``event`` as a row.

    Reports of one event by several sources stay several rows.
    """
    key = key_of(event.process.instance, event.at_unix_ns, event.kind.value, event.source.value, event.pid, event.process_kind)
    return _row_of(ProcessEventRow, event, key=key, offset=offset)


def iteration_row(iteration: Iteration, offset: int) -> IterationRow:
    """Return ``iteration`` as a row."""
    started = iteration.started_unix_ns
    key = key_of(iteration.process.instance, started, iteration.core, iteration.full)
    return _row_of(IterationRow, iteration, key=key, offset=offset, at_unix_ns=started, median_ns=iteration.usual_ns)


def _row_of(row: type[_Row], record: Iteration | ProcessEvent, **own: Any) -> _Row:
    """Return the row of a record: its fields, its process, and ``own``.

    ``own``: fields of the row that the record lacks.
    An enum becomes its value.
    """
    process = record.process
    values: dict[str, Any] = {name: getattr(record, name) for name in _FIELDS[row]}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    values |= {"role": process.role.value, "instance": process.instance, "host": process.host_name or process.host}
    return row(**values | own)


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
