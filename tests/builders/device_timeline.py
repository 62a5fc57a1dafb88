"""A request in a store, with the device samples of its two hosts.

P prefills, then D reads the KV over RDMA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from builders.device_samples import counter, gauge, gpu, port, sample
from builders.request_rows import EDGE, MS, STARTED, D, P, phase, request_row
from handrail import conventions as names
from handrail.records import Process, Role
from handrail.records.devices import DeviceSample, DeviceValue, runs
from handrail_collector.rows import ClockPairRow, RequestRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.samples import table_of
from handrail_collector.store.tables.spans import SpanRow

S = 10**9
TICK = 100 * MS
PROCESSES = {
    "host-p": Process(role=Role.PREFILL, instance=P, host="id-p", host_name="host-p"),
    "host-d": Process(role=Role.DECODE, instance=D, host="id-d", host_name="host-d"),
}

ROW = request_row(
    (
        phase("prefill_queue", 400, "prefill", "otlp"),
        phase("prefill_compute", 900, "prefill", "otlp"),
        phase("router_and_hops", 10, "path", "edge-proxy"),
        phase("kv_transfer", 650, "decode", "plugin"),
        phase("first_step", 40, "decode", "otlp"),
    ),
    ttft_token_ns=2000 * MS,
    ttft_text_ns=2000 * MS,
    ttfb_ns=2000 * MS,
    duration_ns=4 * S,
)
"""A request with a TTFT of 2 s.

It is 0.4 s queued and 0.9 s computed at P; its KV transfer takes 0.65 s.
"""

Load = Callable[[float], float]


def between(begin_s: float, end_s: float, high: float, low: float = 0.02) -> Load:
    """Build a series that is ``high`` inside a time span and ``low`` outside."""
    return lambda at: high if begin_s <= at < end_s else low


def samples_of(
    host: str,
    tensor: Load,
    dram: Load,
    bytes_a_second: Load,
    way: str,
    *,
    gpus: int = 2,
    shift_ns: int = 0,
    links: bool = True,
    engine: str = "",
) -> list[DeviceSample]:
    """Build a host's samples from 1 s before the request to 1 s after its end.

    Times are by the host's clock, which is ``shift_ns`` ahead of the edge's.
    """
    of = PROCESSES[host]
    made = []
    total = 10**15
    for tick in range(-10, 51):
        at, seconds = STARTED + tick * TICK + 37 * MS + shift_ns, (tick * TICK + 37 * MS) / S
        busy = max(tensor(seconds), dram(seconds))
        for index in range(gpus):
            values: tuple[DeviceValue, ...] = (
                gauge(names.GPU_BUSY, min(1.0, busy + 0.1 * index)),
                gauge(names.GPU_TENSOR_ACTIVE, tensor(seconds)),
                gauge(names.GPU_DRAM_ACTIVE, dram(seconds)),
                gauge("throttled", float(index == 1 and busy > 0.5), "power_cap"),
                counter(names.GPU_NVLINK_BYTES, 10**14, names.TRANSMIT),
                counter(names.GPU_PCIE_BYTES, 10**12 + (total - 10**15) // gpus, way),
            )
            if tick == -10:  # sampled every 10 s
                values += (gauge(names.GPU_PCIE_LINE, 63e9),)
            made.append(sample(gpu(index, host, engine=engine), at, *values, of=of))
        total += round(bytes_a_second(seconds) * TICK / S)
        if links:
            made.append(sample(port(0), at, counter(names.LINK_BYTES, total, way), of=of))
    return made


def ordinary(shift_ns: int = 0) -> list[DeviceSample]:
    """Build the samples of both hosts; P's clock is ``shift_ns`` ahead."""
    return [
        *samples_of(
            "host-p",
            between(0.4, 1.3, 0.81),
            between(0.4, 1.3, 0.3, 0.1),
            between(1.3, 2.0, 4.8e9, 0),
            names.TRANSMIT,
            shift_ns=shift_ns,
        ),
        *samples_of("host-d", lambda _: 0.08, lambda _: 0.62, between(1.3, 2.0, 4.8e9, 0), names.RECEIVE),
    ]


def evidence() -> list[SpanRow]:
    """Build the spans that show which host runs which engine."""
    made = []
    for number, (role, instance, host) in enumerate((("edge", EDGE, "e"), ("prefill", P, "p"), ("decode", D, "d"))):
        resource = {names.HOST_ID: f"id-{host}", names.HOST_NAME: f"host-{host}", names.ROLE: role, names.INSTANCE: instance}
        span_id = ROW.request_id if role == "edge" else f"{number:016x}"
        made.append(span(span_id, role, instance, resource))
    return made


def span(span_id: str, role: str, instance: str, resource: dict[str, Any]) -> SpanRow:
    """Build a span that holds nothing else."""
    return SpanRow(
        offset=ROW.first_offset,
        trace_id=ROW.trace_id,
        span_id=span_id,
        parent_span_id="" if span_id == ROW.request_id else ROW.request_id,
        name=role,
        kind=2,
        start_unix_ns=STARTED,
        end_unix_ns=STARTED + S,
        status=0,
        status_message="",
        flags=0,
        trace_state="",
        role=role,
        instance=instance,
        service="",
        scope="handrail.proxy",
        resource=resource,
        attributes={},
        events=(),
        links=(),
        raw_bytes=100,
    )


def pair(host: str, peer: str, low_ns: int | None, high_ns: int | None) -> ClockPairRow:
    """Build a clock bound that is known at about the request's time."""
    return ClockPairRow(
        at_unix_ns=STARTED,
        key=f"{hash((host, peer)) & 0xFFFFFFFF:016x}",
        offset=1,
        host=host,
        peer_host=peer,
        low_ns=low_ns,
        high_ns=high_ns,
    )


def stored(
    root: Path,
    samples: Sequence[DeviceSample],
    pairs: Sequence[ClockPairRow] = (),
    row: RequestRow = ROW,
    spans: Sequence[SpanRow] | None = None,
) -> Path:
    """Write all of it to a collector's data folder; return the folder."""
    publisher = StorePublisher(root / "store")
    publisher.open()
    flat: dict[Table, list[Any]] = {Table.CLOCK_PAIRS: list(pairs)}
    for run in runs(samples):
        flat.setdefault(table_of(run), []).append(run)
    publisher.publish(0, 10_000, 0, evidence() if spans is None else spans, [row], flat={t: r for t, r in flat.items() if r})
    publisher.close()
    return root
