"""Send finished records to the collector.

The steps are encode, batch, spool, send in order, acknowledge.
``sink`` and ``take`` belong to the event loop's thread. ``sink`` encodes one span (43 us, decision 0003) and writes nothing. A
flush joins encoded spans and appends them to the spool, a copy into the page cache: 5 us a span (512 spans of 1.5 kB in 2.5 ms),
so a sidecar that sees 100 requests/s holds its loop for 0.25 ms twice a second: too little to pay for a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from handrail import conventions as names
from handrail.conventions import BATCH_SEQ, SCOPE_EVENTS, SCOPE_PLUGIN, SCOPE_PROXY
from handrail.otlp.payload import count_items, delimited, with_batch_seq
from handrail.otlp.retry import Backoff, DeliveryStats, deliver
from handrail.otlp.signals import Accepted, ReceiverUnavailable, Rejected, Retryable, Signal
from handrail.records import (
    EngineFacts,
    EngineTimes,
    Exchange,
    Iteration,
    KvFetch,
    KvPublish,
    Observation,
    ProcessEvent,
)
from handrail.telemetry.tracing import NO_TRACES, about_own_traces
from handrail.wal.filesystem import Filesystem
from handrail.wal.log import Damage, Full
from handrail.wire.exchange import to_span
from handrail.wire.plugin import plugin_log, plugin_spans
from handrail_sidecar.export.spool import Spool

_LOG = logging.getLogger(__name__)
_FAULT_WAIT_S: Final = 1.0
_REPAIR_S: Final = 1.0
"""Seconds between two tries of a failing disk under the spool."""


Own = Exchange | EngineTimes | KvFetch | KvPublish | Iteration | ProcessEvent | EngineFacts
"""Records that the sidecar sends as its own spans and log records."""

_OWN: Final = (Exchange, EngineTimes, KvFetch, KvPublish, Iteration, ProcessEvent, EngineFacts)


class ExportClient(Protocol):
    """The client that sends: ``handrail.otlp.client.OtlpClient``."""

    async def send(self, signal: Signal, payload: bytes) -> Accepted: ...

    async def close(self) -> None: ...


class ExportDropReason(str, Enum):
    """Why a span of the sidecar was not sent."""

    PENDING_FULL = "pending_full"  # more spans at once than a flush can take
    SPOOL_FULL = "spool_full"  # the collector did not acknowledge for too long
    UNENCODABLE = "unencodable"  # a record that makes no span: an error of the sidecar
    TOO_LARGE = "too_large"
    STOPPED = "stopped"  # came after the shutdown, or was left in memory by it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """Settings of the exporter.

    ``folder`` None keeps the spool in memory. ``max_batch_bytes``: gRPC receivers commonly refuse above 4 MiB.
    """

    folder: str | os.PathLike[str] | None = None
    max_bytes: int = 64 << 20
    flush_interval_s: float = 0.5
    batch_spans: int = 512
    max_batch_bytes: int = 2 << 20
    max_pending_spans: int = 8192
    retry_delay_s: float = 1.0
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(slots=True)
class ExportStats:
    """Counts since start."""

    spans_taken: int = 0
    spans_spooled: int = 0
    batches_spooled: int = 0  # the sidecar's own and tapped ones
    bytes_spooled: int = 0
    tapped_batches: int = 0
    tapped_refused: int = 0  # answered with "retry"
    sender_faults: int = 0
    dropped: dict[ExportDropReason, int] = field(default_factory=lambda: dict.fromkeys(ExportDropReason, 0))


@dataclass(slots=True)
class _ScopeBuffer:
    """Items of one scope that wait for the next flush.

    Each item is framed as ``encode_batch`` takes it.
    """

    signal: Signal
    scope: str
    pending: list[bytes] = field(default_factory=list)


class Exporter:
    """One sender of batches to the collector.

    Its resource carries its ``handrail.sender.id``; its batches are numbered from 1 without holes.
    ``start`` opens the spool and sends what an earlier process left there, unchanged. It raises ``OSError`` (``BlockingIOError``
    when another process has the folder) and what ``client_factory`` raises. When the disk fails later, the exporter goes on from
    memory (``Spool``), so evidence still reaches the collector. ``shutdown`` flushes, sends for up to ``drain_seconds``, and
    leaves the rest in the folder; it works without ``start`` and twice.
    """

    def __init__(
        self,
        settings: ExportSettings,
        resource: Resource,
        client_factory: Callable[[], ExportClient],
        *,
        files: Filesystem | None = None,
        now_unix_ns: Callable[[], int] = time.time_ns,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._tracer = tracer
        self.stats = ExportStats()
        self.delivery = DeliveryStats()
        self._settings = settings
        self._resource = resource.SerializeToString()
        self._client_factory = client_factory
        self._files = files
        self._now_unix_ns = now_unix_ns
        self._exchanges = _ScopeBuffer(Signal.TRACES, SCOPE_PROXY)
        self._plugin_spans = _ScopeBuffer(Signal.TRACES, SCOPE_PLUGIN)
        self._events = _ScopeBuffer(Signal.LOGS, SCOPE_EVENTS)
        self._lanes = (self._exchanges, self._plugin_spans, self._events)
        self._seq = 0
        self._spool: Spool | None = None
        self._spool_full = False
        self._oldest_unix_ns: int | None = None  # of the batch that is being sent
        self._closed = False
        self._some = asyncio.Event()  # set while a span is pending
        self._enough = asyncio.Event()  # set when a whole batch is pending
        self._spooled = asyncio.Event()
        self._empty = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting_bytes(self) -> int:
        """Bytes spooled and not acknowledged."""
        return self._spool.waiting_bytes if self._spool is not None else 0

    @property
    def damaged_bytes(self) -> int:
        """Bytes spooled and lost: they could not be read back."""
        return self._spool.damaged_bytes + self._spool.torn_bytes if self._spool is not None else 0

    @property
    def held_bytes(self) -> int:
        """The part of ``waiting_bytes`` that is in memory because the spool's disk fails."""
        return self._spool.held_bytes if self._spool is not None else 0

    @property
    def spool_errors(self) -> int:
        """Calls to the spool's disk that failed."""
        return self._spool.errors if self._spool is not None else 0

    @property
    def degraded(self) -> str:
        """What is wrong with the spool's disk while evidence goes on; '' for nothing."""
        if self._spool is None or not self._spool.trouble:
            return ""
        full = "; memory is full as well: the sidecar drops new evidence" if self._spool_full else ""
        return f"spool {self._settings.folder}: {self._spool.trouble}: the sidecar keeps evidence in memory{full}"

    @property
    def lag_ns(self) -> int:
        """Age of the oldest batch that is not acknowledged; 0 when none waits."""
        return 0 if self._oldest_unix_ns is None else max(0, self._now_unix_ns() - self._oldest_unix_ns)

    async def start(self) -> None:
        settings = self._settings
        self._spool = Spool(settings.folder, settings.max_bytes, files=self._files, on_damage=_report)
        try:
            client = self._client_factory()
        except BaseException:
            self._spool.close()
            self._spool = None
            raise
        self._tasks = [
            asyncio.create_task(self._flush_on_time()),
            asyncio.create_task(self._send_in_order(client, self._spool)),
            asyncio.create_task(self._repair_on_time(self._spool)),
        ]

    def sink(self, record: Observation) -> None:
        """Take one observation (``records.Sink``).

        It skips records of tapped spans: those are sent as they are.
        """
        if not isinstance(record, _OWN):
            return
        self.stats.spans_taken += 1
        if self._closed:
            self.stats.dropped[ExportDropReason.STOPPED] += 1
        elif sum(len(lane.pending) for lane in self._lanes) >= self._settings.max_pending_spans:
            self.stats.dropped[ExportDropReason.SPOOL_FULL if self._spool_full else ExportDropReason.PENDING_FULL] += 1
        else:
            self._encode(record)

    async def take(self, signal: Signal, payload: bytes) -> None:
        """Take over a tapped export request.

        It has its batch number and is spooled once this returns.
        Raises ``Retryable`` while the spool is full or the sidecar stops, ``Rejected`` for a request that can never fit.
        """
        if self._spool is None or self._closed:
            raise ReceiverUnavailable("stopping", self._settings.retry_delay_s)
        if not count_items(payload):
            return  # a connection check: it has no scope to number
        try:
            self._put(self._spool, signal, with_batch_seq(payload, self._seq + 1))
        except Full:
            self.stats.tapped_refused += 1
            raise Retryable("spool full", self._settings.retry_delay_s) from None
        except ValueError as error:
            raise Rejected(str(error)) from None
        self.stats.tapped_batches += 1

    def flush(self) -> bool:
        """Move what is pending into the spool.

        False when something is left because the spool takes no more.
        """
        spool = self._spool
        if spool is None:
            return False
        waiting = sum(len(lane.pending) for lane in self._lanes)
        if waiting:
            with self._tracer.start_as_current_span(names.OWN_SPOOL, attributes={names.OWN_RECORDS: waiting}) as span:
                for lane in self._lanes:
                    if not self._flush_lane(spool, lane):
                        span.set_status(StatusCode.ERROR, "spool full")
                        return False
        self._spool_full = False
        self._some.clear()
        self._enough.clear()
        return True

    async def shutdown(self, drain_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        self.flush()
        for lane in self._lanes:
            self.stats.dropped[ExportDropReason.STOPPED] += len(lane.pending)
            lane.pending.clear()
        if self._spool is None:
            return
        self._tasks[0].cancel()
        try:
            await asyncio.wait_for(self._empty.wait(), drain_seconds)
        except asyncio.TimeoutError:
            self._spool.repair()
            folder, held = self._settings.folder, self._spool.held_bytes
            then = f"they wait in {folder} for the next start" if folder else "they are lost: spool.dir would keep them"
            if held:
                then = f"{held} of them are lost with this process, whose disk fails; the others wait in {folder}"
            _LOG.warning("stopped with %d bytes not acknowledged by the collector; %s", self.waiting_bytes, then)
        self._stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._settings.folder is None:
            self._count_left(self._spool)
        self.stats.dropped[ExportDropReason.STOPPED] += sum(count_items(batch.payload) for batch in self._spool.held())
        self._spool.close()

    def _flush_lane(self, spool: Spool, lane: _ScopeBuffer) -> bool:
        while lane.pending:
            count = self._fitting(spool, lane.pending)
            batch = lane.pending[:count]
            try:
                self._put(spool, lane.signal, encode_batch(self._resource, self._seq + 1, batch, lane.scope))
            except Full:
                self._spool_full = True
                return False
            except ValueError:
                self.stats.dropped[ExportDropReason.TOO_LARGE] += count
            else:
                self.stats.spans_spooled += count
            del lane.pending[:count]
        return True

    def _encode(self, record: Own) -> None:
        try:
            lane, encoded = self._encoded(record)
        except Exception:  # a sink never raises into a request
            self.stats.dropped[ExportDropReason.UNENCODABLE] += 1
            return
        lane.pending += [delimited(2, item) for item in encoded]
        if not self._some.is_set():
            self._some.set()
        if len(lane.pending) >= self._settings.batch_spans:
            self._enough.set()

    def _encoded(self, record: Own) -> tuple[_ScopeBuffer, list[bytes]]:
        if isinstance(record, Exchange):
            return self._exchanges, [to_span(record).SerializeToString()]
        if isinstance(record, (EngineTimes, KvFetch, KvPublish)) and not record.provisional:
            return self._plugin_spans, [span.SerializeToString() for span in plugin_spans(record)]
        return self._events, [plugin_log(record).SerializeToString()]

    def _fitting(self, spool: Spool, pending: Sequence[bytes]) -> int:
        """How many pending items go into the next batch: at least one."""
        most = min(self._settings.max_batch_bytes, spool.max_payload_bytes // 2)  # half: room for resource and framing
        size = 0
        for count, item in enumerate(pending[: self._settings.batch_spans]):
            size += len(item)
            if count and size > most:
                return count
        return min(len(pending), self._settings.batch_spans)

    def _put(self, spool: Spool, signal: Signal, payload: bytes) -> None:
        """Spool one batch with the next number.

        The number is used up only when that worked, so there are no holes.
        """
        spool.put(signal, payload, self._now_unix_ns())
        self._seq += 1
        self.stats.batches_spooled += 1
        self.stats.bytes_spooled += len(payload)
        self._empty.clear()
        self._spooled.set()

    async def _flush_on_time(self) -> None:
        while True:
            await self._some.wait()
            await _set_within(self._enough, self._settings.flush_interval_s)
            if not self.flush():
                await asyncio.sleep(self._settings.flush_interval_s)

    async def _repair_on_time(self, spool: Spool) -> None:
        while True:
            await asyncio.sleep(_REPAIR_S)
            spool.repair()

    async def _send_in_order(self, client: ExportClient, spool: Spool) -> None:
        try:
            while not self._stop.is_set():
                if not await self._sent_first(client, spool):
                    await _set_within(self._stop, _FAULT_WAIT_S)
        finally:
            await client.close()

    async def _sent_first(self, client: ExportClient, spool: Spool) -> bool:
        """Send the oldest batch; False when the spool cannot be read.

        False also after an error of the sidecar: a bug in the sender must not end all sending.
        """
        try:
            return await self._send_first(client, spool)
        except Exception:
            self.stats.sender_faults += 1
            _LOG.exception("sending failed")
            return False

    async def _send_first(self, client: ExportClient, spool: Spool) -> bool:
        self._spooled.clear()
        try:
            batch = spool.first()
        except OSError:  # counted and logged by the spool
            return False
        self._oldest_unix_ns = batch.at_unix_ns if batch is not None else None
        if batch is None:
            self._empty.set()
            await self._spooled.wait()
            return True
        settings = self._settings
        traced = self._tracer is not NO_TRACES and not about_own_traces(batch.payload)
        about = {names.OWN_SIGNAL: batch.signal.value, names.OWN_BYTES: len(batch.payload)}
        tracer, retries = self._tracer if traced else NO_TRACES, self.delivery.retries
        with tracer.start_as_current_span(names.OWN_EXPORT, kind=SpanKind.CLIENT, attributes=about) as span:
            fate = await deliver(
                client, batch.signal, batch.payload, stop=self._stop, backoff=settings.backoff, stats=self.delivery
            )
            span.set_attribute(names.RETRY_COUNT, self.delivery.retries - retries)
            if fate is None:
                span.set_status(StatusCode.ERROR, "not delivered before the stop")
            elif fate.rejected:
                span.set_status(StatusCode.ERROR, fate.message)
        if fate is not None:
            spool.acknowledge(batch.next_offset)
        return True

    def _count_left(self, spool: Spool) -> None:
        while (batch := spool.first()) is not None:
            self.stats.dropped[ExportDropReason.STOPPED] += count_items(batch.payload)
            spool.acknowledge(batch.next_offset)


def encode_batch(resource: bytes, seq: int, items: Sequence[bytes], scope_name: str = SCOPE_PROXY) -> bytes:
    """Encode an export request of one scope with batch ``seq``.

    It is an ``ExportTraceServiceRequest`` or an ``ExportLogsServiceRequest``; they have one shape.
    ``resource`` is encoded; ``items`` are fields 2 of a ``ScopeSpans`` or ``ScopeLogs``, tag and length included.
    """
    scope = InstrumentationScope(name=scope_name, attributes=[KeyValue(key=BATCH_SEQ, value=AnyValue(int_value=seq))])
    scope_spans = delimited(1, scope.SerializeToString()) + b"".join(items)
    return delimited(1, delimited(1, resource) + delimited(2, scope_spans))


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _report(damage: Damage) -> None:
    _LOG.error("spool damaged: %d bytes from offset %d hold no batch", damage.next_offset - damage.offset, damage.offset)
