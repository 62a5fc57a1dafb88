"""The exporter sends every span once, in order, numbered without holes.

It counts each span that it could not send.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from builders.exchanges import PROCESS, exchange
from doubles.crash_files import CrashFiles
from doubles.failing_files import KINDS, NAMES, FailingFiles
from handrail.otlp.client import OtlpClient
from handrail.otlp.payload import delimited
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.retry import Backoff
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, ReceiverUnavailable, Rejected, Retryable, Signal
from handrail.records import EngineRequest, KvFetch, ProcessEvent, ProcessEventKind, Source, SpanIds
from handrail.wire.exchange import process_of, read_exchange, resource_of, to_span
from handrail.wire.plugin import read_plugin_log, read_plugin_span
from handrail_sidecar.export.exporter import ExportDropReason, Exporter, ExportSettings, encode_batch

QUICK = Backoff(initial_s=0.002, max_s=0.01)
RESOURCE = resource_of(PROCESS)


@dataclass
class Collector:
    """A peer in memory that answers with each of ``answers``, then accepts.

    It keeps what it accepted.
    """

    answers: list[Exception] = field(default_factory=list)
    down: bool = False
    received: list[tuple[Signal, bytes]] = field(default_factory=list)
    attempts: int = 0
    closed: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        async with self.arrived:
            self.attempts += 1
            self.arrived.notify_all()
            if self.down:
                raise Retryable("down", 0.0)
            if self.answers:
                raise self.answers.pop(0)
            self.received.append((signal, payload))
        return Accepted()

    async def close(self) -> None:
        self.closed += 1

    async def until(self, *, batches: int = 0, attempts: int = 0, spans: int = 0) -> None:
        def enough() -> bool:
            return len(self.received) >= batches and self.attempts >= attempts and len(request_ids(self)) >= spans

        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(enough), 60)

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(payload) for _, payload in self.received]


def exporter(collector: Collector, **changed: Any) -> Exporter:
    options = {"flush_interval_s": 0.005, "batch_spans": 4, "backoff": QUICK, "max_bytes": 1 << 20, **changed}
    files = options.pop("files", None)
    return Exporter(ExportSettings(**options), RESOURCE, lambda: collector, files=files)


@pytest.fixture
def collector() -> Collector:
    return Collector()


def seqs(collector: Collector) -> list[int]:
    return [
        attribute.value.int_value
        for request in collector.requests()
        for entry in request.resource_spans
        for scope in entry.scope_spans
        for attribute in scope.scope.attributes
        if attribute.key == "handrail.batch.seq"
    ]


def request_ids(collector: Collector) -> list[str | None]:
    return [
        read_exchange(span, process_of(entry.resource)).request_id
        for request in collector.requests()
        for entry in request.resource_spans
        for scope in entry.scope_spans
        for span in scope.spans
        if scope.scope.name == "handrail.proxy"
    ]


async def until(true: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not true():  # noqa: ASYNC110 - the exporter has no event for it
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 60)


async def fill(sending: Exporter) -> None:
    """Tap metrics until the spool is full."""
    while True:
        await sending.take(Signal.METRICS, tapped(1))


def tapped(number: int) -> bytes:
    span = Span(trace_id=b"t" * 16, span_id=number.to_bytes(8, "big"), name="llm_request")
    scope = ScopeSpans(scope=InstrumentationScope(name="vllm.llm_engine"), spans=[span])
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scope])]).SerializeToString()


async def test_exchanges_arrive_whole_with_resource_scope_and_sequence(collector: Collector) -> None:
    sending = exporter(collector)
    await sending.start()
    for number in range(10):
        sending.sink(exchange(number))
    await sending.shutdown(10)
    assert seqs(collector) == [1, 2, 3]
    assert request_ids(collector) == [f"req-{number}" for number in range(10)]
    (first, *_) = collector.requests()
    assert first.resource_spans[0].resource == RESOURCE
    assert first.resource_spans[0].scope_spans[0].scope.name == "handrail.proxy"
    assert read_exchange(first.resource_spans[0].scope_spans[0].spans[0], PROCESS) == exchange(0)
    assert (sending.stats.spans_taken, sending.stats.spans_spooled, sending.delivery.items_sent) == (10, 10, 10)
    assert sending.waiting_bytes == 0
    assert collector.closed == 1


async def test_a_lone_span_leaves_within_the_interval_and_a_full_batch_at_once(collector: Collector) -> None:
    sending = exporter(collector, flush_interval_s=3600)
    await sending.start()
    for number in range(4):
        sending.sink(exchange(number))
    await collector.until(batches=1)
    await sending.shutdown(1)
    lone = exporter(collector, flush_interval_s=0.001)
    await lone.start()
    lone.sink(exchange(4))
    await collector.until(batches=2)
    await lone.shutdown(1)


async def test_a_batch_stays_below_its_size(collector: Collector) -> None:
    sending = exporter(collector, batch_spans=100, max_batch_bytes=4000, flush_interval_s=3600)
    await sending.start()
    for number in range(10):
        sending.sink(exchange(number))
    await sending.shutdown(10)
    assert [len(request.resource_spans[0].scope_spans[0].spans) for request in collector.requests()] == [2] * 5
    assert all(len(payload) < 4500 for _, payload in collector.received)


async def test_tapped_batches_share_the_numbering_and_keep_their_bytes(collector: Collector) -> None:
    sending = exporter(collector, flush_interval_s=3600)
    await sending.start()
    await sending.take(Signal.TRACES, tapped(1))
    sending.sink(exchange(0))
    sending.flush()
    await sending.take(Signal.TRACES, tapped(2))
    await sending.shutdown(10)
    assert seqs(collector) == [1, 2, 3]
    assert collector.requests()[0].resource_spans[0].scope_spans[0].spans[0].name == "llm_request"
    assert (sending.stats.tapped_batches, sending.stats.batches_spooled) == (2, 3)


async def test_an_empty_tapped_request_uses_no_number(collector: Collector) -> None:
    sending = exporter(collector)
    await sending.start()
    await sending.take(Signal.TRACES, b"")
    await sending.take(Signal.TRACES, tapped(1))
    await sending.shutdown(10)
    assert seqs(collector) == [1]


@pytest.mark.parametrize(
    "answers",
    [
        [Retryable("429", 0.0)] * 3,
        [ReceiverUnavailable("503", 0.001)],
        [RuntimeError("a bug")],
    ],
    ids=["full", "unavailable", "bug"],
)
async def test_what_fails_is_sent_again_in_order(
    collector: Collector, answers: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail_sidecar.export.exporter._FAULT_WAIT_S", 0.001)
    collector.answers = list(answers)
    sending = exporter(collector)
    await sending.start()
    for number in range(12):
        sending.sink(exchange(number))
    await sending.shutdown(10)
    assert request_ids(collector) == [f"req-{number}" for number in range(12)]


async def test_a_rejected_batch_does_not_block_the_others(collector: Collector) -> None:
    collector.answers = [Rejected("never")]
    sending = exporter(collector)
    await sending.start()
    for number in range(8):
        sending.sink(exchange(number))
    await sending.shutdown(10)
    assert request_ids(collector) == [f"req-{number}" for number in range(4, 8)]
    assert (sending.delivery.batches_rejected, sending.delivery.items_rejected) == (1, 4)


async def test_a_full_spool_drops_the_newest_of_ours_and_makes_the_tap_retry(collector: Collector) -> None:
    collector.down = True
    sending = exporter(collector, batch_spans=512, max_pending_spans=100, max_bytes=100_000)
    await sending.start()
    taken = 0
    while sending.stats.dropped[ExportDropReason.SPOOL_FULL] == 0:
        sending.sink(exchange(taken))
        sending.flush()
        taken += 1
    with pytest.raises(Retryable, match="spool full") as refusal:
        await fill(sending)
    assert refusal.value.delay_s == 1.0
    assert sending.stats.tapped_refused == 1
    collector.down = False
    await collector.until(spans=taken - 1)
    await sending.shutdown(10)
    assert seqs(collector) == list(range(1, sending.stats.batches_spooled + 1))
    assert request_ids(collector) == [f"req-{number}" for number in range(taken - 1)]


async def test_pending_is_bounded_before_the_start(collector: Collector) -> None:
    sending = exporter(collector, max_pending_spans=3)
    for number in range(5):
        sending.sink(exchange(number))
    assert sending.stats.dropped[ExportDropReason.PENDING_FULL] == 2
    await sending.start()
    await sending.shutdown(10)
    assert request_ids(collector) == ["req-0", "req-1", "req-2"]


async def test_a_record_that_makes_no_span_is_counted_and_raises_nothing(collector: Collector) -> None:
    sending = exporter(collector)
    await sending.start()
    sending.sink(exchange(ids=SpanIds(trace_id="no hex", span_id="")))
    sending.sink(exchange(1))
    await sending.shutdown(10)
    assert sending.stats.dropped[ExportDropReason.UNENCODABLE] == 1
    assert request_ids(collector) == ["req-1"]


async def test_engine_records_pass_by(collector: Collector) -> None:
    sending = exporter(collector)
    ids = SpanIds(trace_id="1" * 32, span_id="1" * 16)
    sending.sink(
        EngineRequest(process=PROCESS, source=Source.OTLP, ids=ids, engine="vllm", request_id="r", start_unix_ns=1, end_unix_ns=2)
    )
    assert sending.stats.spans_taken == 0


async def test_a_failing_disk_keeps_no_evidence_from_the_collector(collector: Collector) -> None:
    files = CrashFiles()
    sending = exporter(collector, folder="spool", files=files, flush_interval_s=3600)
    await sending.start()
    sending.sink(exchange(0))
    files.refuse["write"] = OSError(errno.EIO, "broken")
    assert sending.flush()
    await sending.take(Signal.TRACES, tapped(1))
    await sending.shutdown(10)
    assert (request_ids(collector), seqs(collector)) == (["req-0"], [1, 2])
    assert sending.spool_errors == 1


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
async def test_a_disk_that_fails_for_good_lets_all_through_numbered_and_says_so(collector: Collector, code: int) -> None:
    files = FailingFiles()
    sending = exporter(collector, folder="spool", files=files)
    await sending.start()
    assert sending.degraded == ""
    files.failing = dict.fromkeys(("write", "truncate", "open_append", "rename", "unlink", "fsync_dir"), code)
    for number in range(40):
        sending.sink(exchange(number))
        await sending.take(Signal.TRACES, tapped(number))
    await collector.until(spans=40)
    assert sending.degraded.startswith("spool spool: ")
    assert sending.degraded.endswith(": the sidecar keeps evidence in memory")
    assert sending.spool_errors > 0
    await sending.shutdown(10)
    assert seqs(collector) == list(range(1, sending.stats.batches_spooled + 1))
    assert request_ids(collector) == [f"req-{number}" for number in range(40)]
    assert sum(sending.stats.dropped.values()) == 0


async def test_the_disk_is_tried_again_by_itself(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail_sidecar.export.exporter._REPAIR_S", 0.001)
    collector.down = True
    files = FailingFiles()
    sending = exporter(collector, folder="spool", files=files)
    await sending.start()
    files.failing = {"write": errno.ENOSPC}
    await sending.take(Signal.TRACES, tapped(0))
    assert sending.held_bytes == sending.waiting_bytes > 0
    files.failing = {}
    await until(lambda: not sending.degraded and not sending.held_bytes)
    await sending.shutdown(0.01)
    assert sending.stats.dropped[ExportDropReason.STOPPED] == 0
    collector.down = False
    following = exporter(collector, folder="spool", files=files)
    await following.start()
    await following.shutdown(10)
    assert seqs(collector) == [1]


async def test_spans_beyond_memory_are_counted_and_reported(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.down = True
    files = FailingFiles()
    sending = exporter(collector, folder="spool", files=files, max_bytes=100_000, max_pending_spans=50)
    await sending.start()
    files.failing = {"write": errno.EROFS, "truncate": errno.EROFS}
    with pytest.raises(Retryable, match="spool full"):
        await fill(sending)
    number = 0
    while sending.stats.dropped[ExportDropReason.SPOOL_FULL] == 0:
        sending.sink(exchange(number))
        sending.flush()
        number += 1
    assert sending.degraded == (
        "spool spool: Read-only file system: the sidecar keeps evidence in memory; memory is full as well: the "
        "sidecar drops new evidence"
    )
    await sending.shutdown(0.01)
    assert (
        sending.stats.dropped[ExportDropReason.STOPPED] >= sending.stats.tapped_batches
    )  # each holds one span, and the ones that were pending
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "of them are lost with this process, whose disk fails; the others wait in spool" in caplog.text


async def test_a_spool_that_cannot_be_read_is_tried_again_and_then_passed_over(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail_sidecar.export.exporter._FAULT_WAIT_S", 0.001)
    files = FailingFiles()
    sending = exporter(collector, folder="spool", files=files)
    await sending.start()
    files.failing = {"read_at": errno.EIO}
    await sending.take(Signal.TRACES, tapped(0))
    await until(lambda: sending.damaged_bytes > 0)
    files.failing = {}
    await sending.take(Signal.TRACES, tapped(1))
    await collector.until(batches=1)
    await sending.shutdown(10)
    assert seqs(collector) == [2]
    assert (sending.delivery.items_sent, sending.stats.sender_faults) == (1, 0)


async def test_what_is_too_large_for_the_spool_is_refused_or_counted(collector: Collector) -> None:
    sending = exporter(collector, max_bytes=50_000)
    await sending.start()
    sending.sink(exchange(0, model="m" * 60_000))
    sending.flush()
    assert sending.stats.dropped[ExportDropReason.TOO_LARGE] == 1
    with pytest.raises(Rejected, match="above the limit"):
        await sending.take(Signal.LOGS, encode_batch(bytes(60_000), 1, [delimited(2, b"")]))
    await sending.shutdown(10)
    assert collector.received == []


async def test_after_the_shutdown_nothing_is_taken(collector: Collector) -> None:
    sending = exporter(collector)
    await sending.start()
    await sending.shutdown(10)
    await sending.shutdown(10)
    sending.sink(exchange(0))
    assert sending.stats.dropped[ExportDropReason.STOPPED] == 1
    with pytest.raises(ReceiverUnavailable):
        await sending.take(Signal.TRACES, tapped(1))


async def test_a_client_that_cannot_be_made_is_an_error_of_start(tmp_path: Path) -> None:
    sending = Exporter(ExportSettings(folder=tmp_path), RESOURCE, lambda: OtlpClient(ClientSettings(endpoint="ftp://nowhere")))
    for _ in range(2):
        with pytest.raises(ValueError, match="ftp"):
            await sending.start()
    await sending.shutdown(1)


async def test_shutdown_without_start(collector: Collector) -> None:
    sending = exporter(collector)
    sending.sink(exchange(0))
    await sending.shutdown(10)
    assert sending.stats.dropped[ExportDropReason.STOPPED] == 1


async def test_what_the_deadline_leaves_is_sent_by_the_next_process_unchanged(
    collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector.down = True
    sending = exporter(collector, folder=tmp_path)
    await sending.start()
    for number in range(6):
        sending.sink(exchange(number))
    await collector.until(attempts=1)
    await sending.shutdown(0.01)
    assert f"not acknowledged by the collector; they wait in {tmp_path} for the next start" in caplog.text
    assert sending.stats.dropped[ExportDropReason.STOPPED] == 0
    collector.down = False
    following = Exporter(
        ExportSettings(folder=tmp_path, max_bytes=1 << 20, backoff=QUICK),
        resource_of(PROCESS, extra={"zone": "b"}),
        lambda: collector,
    )
    await following.start()
    following.sink(exchange(6))
    await following.shutdown(10)
    assert seqs(collector) == [1, 2, 1]
    assert request_ids(collector) == [f"req-{number}" for number in range(7)]
    assert collector.requests()[0].resource_spans[0].resource == RESOURCE


async def test_spans_left_in_memory_at_the_deadline_are_lost_counted_and_reported(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.down = True
    sending = exporter(collector)
    await sending.start()
    for number in range(6):
        sending.sink(exchange(number))
    await sending.shutdown(0.01)
    assert "not acknowledged by the collector; they are lost: spool.dir would keep them" in caplog.text
    assert sending.stats.dropped[ExportDropReason.STOPPED] == 6


async def test_against_the_real_client_and_server(collector: Collector) -> None:
    received: list[bytes] = []

    class Keeper:
        async def consume(self, signal: Signal, payload: bytes) -> None:
            received.append(payload)

    server = OtlpServer(Keeper(), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    endpoint = f"http://127.0.0.1:{server.http_address[1]}"
    sending = Exporter(ExportSettings(backoff=QUICK), RESOURCE, lambda: OtlpClient(ClientSettings(endpoint=endpoint)))
    await sending.start()
    for number in range(600):
        sending.sink(exchange(number))
    await sending.shutdown(10)
    await server.shutdown(1)
    collector.received = [(Signal.TRACES, payload) for payload in received]
    assert request_ids(collector) == [f"req-{number}" for number in range(600)]


def test_a_batch_is_what_the_protobuf_library_would_write() -> None:
    spans = [to_span(exchange(number)) for number in range(3)]
    expected = ExportTraceServiceRequest()
    entry = expected.resource_spans.add(resource=RESOURCE)
    scope = entry.scope_spans.add()
    scope.scope.name = "handrail.proxy"
    scope.scope.attributes.add(key="handrail.batch.seq").value.int_value = 300
    scope.spans.extend(spans)
    encoded = encode_batch(RESOURCE.SerializeToString(), 300, [delimited(2, span.SerializeToString()) for span in spans])
    assert encoded == expected.SerializeToString()


async def test_the_plugins_records_go_under_their_own_scopes(collector: Collector) -> None:
    """Final records become spans; open ones and events become log records.

    Every batch holds one scope and has the next number.
    """
    sending = exporter(collector)
    await sending.start()
    process = exchange().process
    ids = SpanIds(trace_id="a" * 32, span_id="b" * 16)
    fetch = KvFetch(
        process=process, source=Source.PLUGIN, ids=ids, engine="vllm", request_id="r", known_unix_ns=10**18, ended_ns=5
    )
    event = ProcessEvent(process=process, source=Source.PLUGIN, at_unix_ns=10**18, kind=ProcessEventKind.STARTED)
    for record in (exchange(1), fetch, replace(fetch, provisional=True, ended_ns=None, seen_ns=4), event):
        sending.sink(record)
    await sending.shutdown(5.0)
    assert [signal for signal, _ in collector.received] == [Signal.TRACES, Signal.TRACES, Signal.LOGS]
    scopes, numbers, read = [], [], []
    for signal, payload in collector.received:
        if signal is Signal.LOGS:
            logs = ExportLogsServiceRequest.FromString(payload).resource_logs[0].scope_logs[0]
            scope = logs.scope
            read += [read_plugin_log(log, process) for log in logs.log_records]
        else:
            spans = ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans[0]
            scope = spans.scope
            read += [read_plugin_span(span, process) for span in spans.spans]
        scopes.append(scope.name)
        numbers.append(scope.attributes[0].value.int_value)
    assert (scopes, numbers) == (["handrail.proxy", "handrail.plugin", "handrail.events"], [1, 2, 3])
    assert read == [None, fetch, replace(fetch, provisional=True, ended_ns=None, seen_ns=4), event]
    assert sending.stats.spans_spooled == 4
