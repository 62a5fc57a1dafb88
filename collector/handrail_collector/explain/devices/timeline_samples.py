"""Read the GPU and link samples under one request from a store.

The API and the command line add them to the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from handrail import conventions as names
from handrail.clock_offset import OffsetInterval
from handrail.records.devices import DeviceSample
from handrail_collector.explain.devices.timeline import LINES, TRACKED, PlaceDevices, between, clock_offset, place_of
from handrail_collector.rows import ClockPairRow, RequestRow
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.spans import SpanRow

SECOND: Final = 1_000_000_000
MARGIN_NS: Final = 2 * SECOND
"""Time read before and after the request.

It includes the sample that the first one is compared with.
"""

LINES_NS: Final = 25 * SECOND
"""Time before and after in which line rates are read.

They are sampled every 10 s and hardly change.
"""

MOST_POINTS: Final = 600
"""Most points of one series.

A request of more than a minute (at 10 Hz) is sampled less often, in as many parts.
"""

PAIRS_NS: Final = 150 * SECOND
"""Time before and after in which clock pairs are read; one is stored every minute."""

MOST_PAIRS: Final = 10_000
FURTHEST_NS: Final = 3_600 * SECOND
"""Largest clock offset for which samples are searched.

Beyond it nothing is drawn, and the bound shows why.
"""


def tracked(reader: StoreReader, row: RequestRow, spans: Sequence[SpanRow]) -> dict[str, Any]:
    """Return the devices of a request as JSON (docs/http-api.md, ``hardware``).

    Raises ``StoreDamagedError``.
    """
    since, until = row.started_unix_ns, row.started_unix_ns + row.duration_ns
    every = 0 if until - since <= MOST_POINTS * SECOND // 10 else (until - since) // MOST_POINTS
    pairs = _pairs(reader, row)
    clock = _clock_of(row, spans) or _clock_by_name(row, pairs)
    places: list[PlaceDevices] = []
    for place, instance, host in (
        ("prefill", row.prefill_instance, row.prefill_host),
        ("decode", row.decode_instance, row.decode_host),
    ):
        if host and not any(known.host == host and known.instance == instance for known in places):
            host_id = _host_id(host, spans)
            places.append(_place(reader, pairs, clock, place, instance or "", host, host_id, (since, until, every)))
    return {
        "since_unix_ns": since,
        "until_unix_ns": until,
        "every_ns": every,
        "places": [to_json(place) for place in places],
    }


def to_json(place: PlaceDevices) -> dict[str, Any]:
    """Return every field of a place; of a device, its identity and its series."""
    plain = asdict(place)
    plain["chosen"] = place.chosen.value if place.chosen is not None else None
    plain["devices"] = [
        {**asdict(each.device), "kind": each.device.kind.value, "tracks": [asdict(track) for track in each.tracks]}
        for each in place.devices
    ]
    return plain


def _place(
    reader: StoreReader,
    pairs: dict[tuple[str, str], OffsetInterval],
    clock: str,
    place: str,
    instance: str,
    host: str,
    host_id: str,
    window: tuple[int, int, int],
) -> PlaceDevices:
    since, until, every = window
    known = between(pairs, clock, host_id) if clock else None
    offset = clock_offset(known, same=bool(clock) and clock == host_id)
    shift = offset.shift_ns if abs(offset.shift_ns) <= FURTHEST_NS else 0
    wanted = SampleFilter(
        since_unix_ns=since + shift - MARGIN_NS - every,
        until_unix_ns=until + shift + MARGIN_NS + every,
        hosts=frozenset({host}),
        names=TRACKED,
        every_ns=every,
    )
    samples: list[DeviceSample] = []
    for table in (Table.GPU_SAMPLES, Table.LINK_SAMPLES):
        samples += reader.samples(table, wanted)
    samples += _lines(reader, host, samples, (since + shift, until + shift))
    return place_of(place, instance, host, samples, since, offset)


def _lines(reader: StoreReader, host: str, of: Iterable[DeviceSample], window: tuple[int, int]) -> list[DeviceSample]:
    """Return line-rate samples of these devices, nearest before the end of the time."""
    devices = {(sample.process.instance, sample.device.key) for sample in of}
    since, until = window
    wanted = SampleFilter(since_unix_ns=since - LINES_NS, until_unix_ns=until + LINES_NS, hosts=frozenset({host}), names=LINES)
    device_samples: dict[tuple[str, str], DeviceSample] = {}
    for sample in reader.samples(Table.GPU_SAMPLES, wanted):
        key = (sample.process.instance, sample.device.key)
        if sample.values and key in devices and (key not in device_samples or sample.at_unix_ns <= until):
            device_samples[key] = sample
    return list(device_samples.values())


def _host_id(host: str, spans: Iterable[SpanRow]) -> str:
    """Return a host's id from its evidence; rows use its name, clock pairs its id."""
    for span in spans:
        if span.resource.get(names.HOST_NAME) == host and isinstance(found := span.resource.get(names.HOST_ID), str):
            return found
    return host


def _clock_of(row: RequestRow, spans: Iterable[SpanRow]) -> str:
    """Return the id of the host whose clock gave the row's start; '' where unknown."""
    for span in spans:
        if span.span_id == row.request_id:
            found = span.resource.get(names.HOST_ID) or span.resource.get(names.HOST_NAME)
            return found if isinstance(found, str) else ""
    return ""


def _clock_by_name(row: RequestRow, pairs: Iterable[tuple[str, str]]) -> str:
    """Return that host without spans, where hosts are related by name; else ''.

    A run in virtual time stores no spans.
    """
    by_scope = {"edge": (row.edge_instance or "").rpartition(":")[0], "decode": row.decode_host}
    host = by_scope.get(row.scope)
    return host if host and any(host in pair for pair in pairs) else ""


def _pairs(reader: StoreReader, row: RequestRow) -> dict[tuple[str, str], OffsetInterval]:
    """Return the clock offsets known nearest to the request's time."""
    reports: Sequence[Any] = reader.events(
        Table.CLOCK_PAIRS, row.started_unix_ns - PAIRS_NS, row.started_unix_ns + row.duration_ns + PAIRS_NS, MOST_PAIRS
    )
    nearest: dict[tuple[str, str], ClockPairRow] = {}
    for pair in reports:
        known = nearest.get((pair.host, pair.peer_host))
        if known is None or abs(pair.at_unix_ns - row.started_unix_ns) < abs(known.at_unix_ns - row.started_unix_ns):
            nearest[pair.host, pair.peer_host] = pair
    return {
        key: OffsetInterval(pair.low_ns, pair.high_ns, pair.at_unix_ns).aged(row.started_unix_ns) for key, pair in nearest.items()
    }
