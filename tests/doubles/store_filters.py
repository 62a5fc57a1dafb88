"""What the filters of a store mean, in plain Python.

The storage battery compares every store with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import fsum
from typing import Any, TypeVar

from handrail.records import EngineSample
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_collector.rows import MERGED, FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import FAILED, FETCH_SORTS, SORT_FIELDS, FetchFilter, RequestFilter, SampleFilter


def matches(wanted: RequestFilter, row: RequestRow) -> bool:
    """Check whether the row matches."""
    return (
        row.scope != MERGED
        and (wanted.since_unix_ns is None or row.started_unix_ns >= wanted.since_unix_ns)
        and (wanted.until_unix_ns is None or row.started_unix_ns < wanted.until_unix_ns)
        and wanted.scope in (None, row.scope)
        and wanted.outcome in (None, row.outcome)
        and wanted.model in (None, row.model)
        and (wanted.instance is None or wanted.instance in instances(row))
        and (wanted.min_ttft_ns is None or (row.ttft_token_ns is not None and row.ttft_token_ns >= wanted.min_ttft_ns))
        and (wanted.finding is None or any(wanted.finding in (f, f.partition(":")[0]) for f in row.findings))
        and (wanted.text is None or any(wanted.text.lower() in text.lower() for text in texts(row)))
    )


def order(wanted: RequestFilter, row: RequestRow) -> tuple[bool, int, int, str, str]:
    """Return the ascending sort key of a row.

    Rows with a value come first, then the later start, then the ids.
    """
    value = sort_value(row, wanted.sort)
    signed = 0 if value is None else -value if wanted.descending else value
    return value is None, signed, -row.started_unix_ns, row.trace_id, row.request_id


def sort_value(row: RequestRow, sort: str) -> int | None:
    """Return the figure of ``row`` that ``sort`` names, ns."""
    if sort in SORT_FIELDS:
        value: int | None = getattr(row, SORT_FIELDS[sort])
        return value
    durations = [phase.duration_ns for phase in row.phases if phase.phase == sort]
    return sum(durations) if durations else None


def instances(row: RequestRow) -> tuple[str | None, ...]:
    """List the processes of the request."""
    return row.edge_instance, row.router_instance, row.prefill_instance, row.decode_instance


def texts(row: RequestRow) -> tuple[str, ...]:
    """List the texts that ``text`` searches."""
    ids = (row.trace_id, row.request_id, row.client_request_id, row.request_key, row.response_id)
    return tuple(text for text in (*ids, row.model, *instances(row), row.error_type, *row.findings) if text)


def fetch_matches(wanted: FetchFilter, row: FetchRow) -> bool:
    """Check whether the row matches."""
    return (
        row.number >= 0
        and (wanted.since_unix_ns is None or row.started_unix_ns >= wanted.since_unix_ns)
        and (wanted.until_unix_ns is None or row.started_unix_ns < wanted.until_unix_ns)
        and wanted.outcome in (None, row.outcome)
        and (wanted.failed is None or wanted.failed == (row.outcome in FAILED))
        and wanted.open in (None, row.open)
        and wanted.direction in (None, row.direction)
        and (wanted.peer is None or wanted.peer in peers(row))
    )


def fetch_order(wanted: FetchFilter, row: FetchRow) -> tuple[bool, int, int, str, str, int]:
    """Return the ascending sort key of a row.

    Rows with a value come first, then the later start, then the ids.
    """
    value: int | None = getattr(row, FETCH_SORTS[wanted.sort])
    signed = 0 if value is None else -value if wanted.descending else value
    return value is None, signed, -row.started_unix_ns, row.trace_id, row.request_id, row.number


def peers(row: FetchRow) -> tuple[str | None, ...]:
    """List the values of a row that ``peer`` may name."""
    return row.consumer_instance, row.producer_instance, row.consumer_host, row.producer_host, row.producer_address


def sample_matches(wanted: SampleFilter, sample: DeviceSample | EngineSample) -> bool:
    """Check whether the sample matches."""
    process = sample.process
    return wanted.since_unix_ns <= sample.at_unix_ns < wanted.until_unix_ns and (
        wanted.hosts is None or process.host in wanted.hosts or process.host_name in wanted.hosts
    )


def thinned(samples: Iterable[DeviceSample], since_unix_ns: int, every_ns: int) -> list[DeviceSample]:
    """Reduce samples to one per device and interval.

    It has the time of the interval's last sample and the longest ``took_ns``.
    Counters that restart within an interval give two samples. ``samples``: oldest first.
    """
    parts: dict[Any, list[DeviceSample]] = {}
    for sample in samples:
        starts = frozenset(value.start_unix_ns for value in sample.values)
        part = (sample.at_unix_ns - since_unix_ns) // every_ns
        parts.setdefault((part, sample.process, sample.source, sample.device, starts), []).append(sample)
    return [
        replace(of[-1], values=tuple(_together(of)), took_ns=max(sample.took_ns for sample in of))
        for of in sorted(parts.values(), key=lambda of: of[-1].at_unix_ns)
    ]


def _together(samples: list[DeviceSample]) -> Iterable[DeviceValue]:
    values: dict[tuple[str, str, int], list[float]] = {}
    for sample in samples:
        for value in sample.values:
            values.setdefault((value.name, value.label, value.start_unix_ns), []).append(value.value)
    for (name, label, start), found in sorted(values.items()):
        number = found[-1] if start else fsum(found) / len(found)
        yield DeviceValue(name=name, value=number, label=label, start_unix_ns=start)


VersionedRowT = TypeVar("VersionedRowT", FetchRow, StallRow)


def newest_version(rows: Iterable[VersionedRowT]) -> list[VersionedRowT]:
    """Return each request's fetches or stalls of its highest version.

    Each number appears once; of equal ones the last in ``rows`` wins.
    """
    newest: dict[tuple[str, str], tuple[int, dict[int, VersionedRowT]]] = {}
    for row in rows:
        key = row.trace_id, row.request_id
        known = newest.get(key)
        if known is None or known[0] < row.version:
            newest[key] = row.version, {row.number: row}
        elif known[0] == row.version:
            known[1][row.number] = row
    return [row for _, numbered in newest.values() for row in numbered.values()]
