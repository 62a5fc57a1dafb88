"""Measure what the samples of a host with eight busy GPUs cost.

The figures cover the way from the sidecar's encoder to the folded file, for 28 counters at 10 Hz.
The samples are synthetic (``device_samples.busy_host``): a load in which every counter moves.
Milliseconds are CPU time for one second of one host.
"""

from __future__ import annotations

import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from builders.device_samples import GPU_TABLE, busy_host, process
from handrail.records.devices import DeviceRun, DeviceSample
from handrail.wire.device_samples import DeviceMetrics, devices_request, named, read_devices
from handrail_collector.store.compaction import fold_samples
from handrail_collector.store.schema import Table, encode
from handrail_collector.store.tables.samples import SAMPLED
from handrail_sidecar.export.resource import own_resource

SECONDS = 1200
RATE_HZ = 10
PUBLISH_S = 5
DAY_S = 86_400


def run() -> list[dict[str, Any]]:
    """Return the figures: CPU time, bytes on the wire and bytes on disk."""
    instants = list(busy_host(SECONDS, RATE_HZ))
    values = sum(len(sample.values) for instant in instants for sample in instant)
    samples = sum(map(len, instants))
    encoding, payloads = _timed(lambda: _requests(instants))
    decoding, runs = _timed(lambda: [run for payload in payloads for run in _read(payload)])
    storing, parts = _timed(lambda: _published(runs))
    folding, folded = _timed(lambda: _folded([table for table, _ in parts]))
    wire, zipped = sum(map(len, payloads)), sum(len(gzip.compress(payload, 1)) for payload in payloads[::20]) * 20
    return [
        _figure("devices: values", values / SECONDS, "1/s", None),
        _figure("devices: sidecar encodes", encoding * 1000 / SECONDS, "ms/s", 10.0),
        _figure("devices: on the wire", wire / SECONDS, "B/s", None),
        _figure("devices: on the wire, gzip", zipped / SECONDS, "B/s", None),
        _figure("devices: collector reads", decoding * 1000 / SECONDS, "ms/s", None),
        _figure("devices: collector stores", storing * 1000 / SECONDS, "ms/s", None),
        _figure("devices: collector folds", folding * 1000 / SECONDS, "ms/s", None),
        _figure("devices: collector in all", (decoding + storing + folding) * 1000 / SECONDS, "ms/s", 10.0),
        _figure("devices: an hour not folded yet", sum(len(data) for _, data in parts) / SECONDS * 3600 / 1e6, "MB", None),
        _figure("devices: folded, a value", len(folded) / values, "B", 2.0),
        _figure("devices: folded, a sample", len(folded) / samples, "B", 60.0),
        _figure("devices: folded, a day", len(folded) / SECONDS * DAY_S / 1e6, "MB", None),
    ]


def _timed(call: Any) -> tuple[float, Any]:
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def _requests(instants: Sequence[Sequence[DeviceSample]]) -> list[bytes]:
    tables, resource, payloads = named(gpu=GPU_TABLE), own_resource(process()), []
    for second in range(SECONDS):
        batch = DeviceMetrics(tables)
        for instant in instants[second * RATE_HZ : (second + 1) * RATE_HZ]:
            for sample in instant:
                batch.add(sample)
        payloads.append(devices_request(resource, batch))
    return payloads


def _read(payload: bytes) -> list[DeviceRun]:
    (entry,) = ExportMetricsServiceRequest.FromString(payload).resource_metrics
    return read_devices(entry.scope_metrics[0].metrics, process())


def _published(runs: Sequence[DeviceRun]) -> list[tuple[Any, bytes]]:
    kind, made = SAMPLED[Table.GPU_SAMPLES], []
    a_publish = 8 * PUBLISH_S
    for start in range(0, len(runs), a_publish):
        table = kind.encode(runs[start : start + a_publish])
        made.append((table, encode(table, Table.GPU_SAMPLES, kind.columns_of(table))))
    return made


def _folded(tables: Sequence[Any]) -> bytes:
    table, columns = fold_samples(Table.GPU_SAMPLES, tables)
    return encode(table, Table.GPU_SAMPLES, columns)


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
