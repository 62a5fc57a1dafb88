"""Own traces reach a backend, in bounded memory, whatever the backend does.

Nothing of them blocks or ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from doubles.otlp import Keeping, until
from doubles.own_spans import KeptSpans
from handrail import __version__
from handrail import conventions as names
from handrail.config.telemetry import OwnTracesConfig
from handrail.config.types import Url
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Signal
from handrail.otlp.values import attributes_of
from handrail.runtime.process import start
from handrail.telemetry.resource import process_resource
from handrail.telemetry.traces import OwnTraces, own_traces, own_traces_rows
from handrail.telemetry.tracing import about_own_traces, record_span
from handrail_sidecar.sampling.worker import Reading, Task, trace_late
from harness.rotel import missing, rotel
from harness.skips import MISSING

RESOURCE = process_resource("handrail-sidecar", "abc", {names.ROLE: "decode", names.CLUSTER: ""})


def traced(backend: KeptSpans, *, ratio: float = 1.0, max_queue: int = 100, delay_s: float = 0.001) -> OwnTraces:
    return OwnTraces(RESOURCE, ratio, lambda: backend, max_queue=max_queue, delay_s=delay_s)


def work(traces: OwnTraces, name: str = names.OWN_PUBLISH, times: int = 1) -> None:
    for _ in range(times):
        with traces.tracer.start_as_current_span(name):
            pass


def fates(traces: OwnTraces) -> dict[str, float]:
    (row,) = own_traces_rows(traces.stats, names.METRIC_SIDECAR)
    assert row.name == "handrail_sidecar_own_spans"
    value = row.read()
    assert isinstance(value, dict)
    return {outcome: count for (outcome,), count in value.items()}


async def test_what_waits_is_sent_at_the_stop() -> None:
    backend = KeptSpans()
    traces = traced(backend, delay_s=3600)
    await traces.start()
    work(traces, times=3)
    await traces.shutdown(60)
    await traces.shutdown(60)
    assert backend.names == [names.OWN_PUBLISH] * 3
    assert backend.closed
    assert fates(traces) == {"sent": 3, "failed": 0, "dropped": 0}


async def test_shutdown_without_start_and_work_after_the_stop() -> None:
    backend = KeptSpans()
    await traced(backend).shutdown(1)
    traces = traced(backend)
    await traces.start()
    await traces.shutdown(60)
    work(traces)
    assert fates(traces) == {"sent": 0, "failed": 0, "dropped": 1}


async def test_a_backend_that_hangs_costs_a_bounded_queue_and_no_stop_beyond_its_drain() -> None:
    backend = KeptSpans()
    backend.gate.clear()
    traces = traced(backend, max_queue=10)
    await traces.start()
    work(traces)
    await asyncio.to_thread(backend.entered.wait)
    work(traces, times=50)
    assert fates(traces)["dropped"] == 41
    await traces.shutdown(0.01)
    assert backend.closed


async def test_a_backend_that_refuses_is_reported_once_and_again_when_it_takes_spans(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "handrail.telemetry.traces")
    backend = KeptSpans(refusals=2)
    traces = traced(backend)
    await traces.start()
    for sent in range(3):
        work(traces)
        await until(lambda sent=sent: traces.stats.sent + traces.stats.failed > sent)  # type: ignore[misc]
    await until(lambda: "again" in caplog.text)
    await traces.shutdown(60)
    assert fates(traces) == {"sent": 1, "failed": 2, "dropped": 0}
    assert [line for line in caplog.messages if "own traces" in line] == [
        "the backend does not accept own traces, which are lost meanwhile: it is down",
        "http://backend:4318 accepts own traces again",
    ]


async def test_rare_operations_are_always_traced_and_frequent_ones_by_the_ratio() -> None:
    backend = KeptSpans()
    traces = traced(backend, ratio=0.0, max_queue=1000)
    await traces.start()
    for name in (names.OWN_COMMIT, names.OWN_UPKEEP):
        with traces.tracer.start_as_current_span(name), traces.tracer.start_as_current_span(names.OWN_SYNC):
            pass
    await traces.shutdown(60)
    assert sorted(backend.names) == [names.OWN_SYNC, names.OWN_UPKEEP]
    half = traced(KeptSpans(), ratio=0.5, max_queue=1000)
    await half.start()
    work(half, names.OWN_COMMIT, 400)
    await half.shutdown(60)
    assert 100 < half.stats.sent < 300  # fails once in 10**23 runs


async def test_parts_are_traced_and_their_tasks_begin_traces_of_their_own() -> None:
    """A task inherits the context of its creator.

    All that a part ever did would be a child of its start.
    """
    backend, done = KeptSpans(), asyncio.Event()

    async def task() -> None:
        with backend.tracer.start_as_current_span("work"):
            done.set()

    class Part:
        async def start(self) -> None:
            asyncio.create_task(task())  # noqa: RUF006 - awaited by `done`

        async def shutdown(self, drain_seconds: float) -> None:
            raise ValueError("it does not end")

    async with AsyncExitStack() as stack:
        await start(stack, "exporter", Part(), 1.0, backend.tracer)
        await done.wait()
    begun, ended, other = backend.one(names.OWN_PART_START), backend.one(names.OWN_PART_STOP), backend.one("work")
    assert begun.attributes == ended.attributes == {names.OWN_PART: "exporter"}
    assert begun.status.is_unset
    assert not ended.status.is_ok
    assert [event.name for event in ended.events] == ["exception"]
    assert other.parent is None


def test_samples_that_were_a_whole_period_late_are_traced() -> None:
    backend = KeptSpans()
    slow, quick = Task("gpu0", 100, 1000), Task("gpu1", 10, 1000)
    trace_late(backend.tracer, "gpu", [Reading(quick, None, 5000, 5001, 0)], 1_000_000)
    trace_late(backend.tracer, "gpu", [], 1_000_000)
    assert backend.spans == []
    trace_late(backend.tracer, "gpu", [Reading(quick, None, 5000, 5001, 9), Reading(slow, None, 5001, 5002, 2)], 1_000_000)
    span = backend.one(names.OWN_LATE)
    assert (span.start_time, span.end_time) == (1_004_801, 1_005_001)
    assert span.attributes == {names.OWN_SAMPLER: "gpu", names.OWN_MISSED: 2}


def test_own_spans_are_known_by_their_scope() -> None:
    backend = KeptSpans()
    record_span(backend.tracer, "x", 1, 2, {})
    assert about_own_traces(backend.payload())
    other = ExportTraceServiceRequest()
    other.resource_spans.add().scope_spans.add().spans.add(name=names.SCOPE_OWN)
    assert not about_own_traces(other.SerializeToString())


def test_every_span_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text(encoding="utf-8")
    made = {value for name, value in vars(names).items() if name.startswith("OWN_") and isinstance(value, str)}
    spans = {value for value in made if not value.startswith("handrail.") and not value.endswith(".")}
    assert spans >= set(names.OWN_FREQUENT)
    assert [span for span in sorted(spans) if f"`{span}`" not in page] == []


@asynccontextmanager
async def serving(kept: Keeping) -> AsyncIterator[dict[str, str]]:
    server = OtlpServer(kept, grpc=("127.0.0.1", 0), http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.grpc_address is not None
    assert server.http_address is not None
    try:
        yield {"grpc": f"grpc://127.0.0.1:{server.grpc_address[1]}", "http": f"http://127.0.0.1:{server.http_address[1]}"}
    finally:
        await server.shutdown()


def to(endpoint: str) -> OwnTraces:
    traces, security = own_traces(OwnTracesConfig(endpoint=Url(endpoint), sample_ratio=1.0), RESOURCE)
    assert traces is not None
    assert security is not None
    return traces


def test_nothing_is_traced_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert own_traces(OwnTracesConfig(), RESOURCE) == (None, None)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_sdk_sends_to_a_receiver(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=engine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "engine")
    kept = Keeping()
    async with serving(kept) as endpoints:
        traces, _ = own_traces(
            OwnTracesConfig(endpoint=Url(endpoints[protocol]), sample_ratio=1.0),
            process_resource("handrail-sidecar", "abc", {names.ROLE: "decode", names.CLUSTER: ""}),
        )
        assert traces is not None
        await traces.start()
        work(traces, names.OWN_EXPORT)
        await traces.shutdown(60)
    assert fates(traces) == {"sent": 1, "failed": 0, "dropped": 0}
    (entry,) = [e for _, payload in kept.taken for e in ExportTraceServiceRequest.FromString(payload).resource_spans]
    about = attributes_of(entry.resource.attributes)
    assert about.pop("process.pid")
    assert about.pop("host.name")
    assert about.pop("telemetry.sdk.version")
    assert about == {
        "service.name": "handrail-sidecar",
        "service.version": __version__,
        "service.instance.id": "abc",
        "handrail.role": "decode",
        "deployment.environment.name": "test",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.language": "python",
    }
    assert [(s.scope.name, [span.name for span in s.spans]) for s in entry.scope_spans] == [("handrail.own", ["export.batch"])]


class Lines(logging.Handler):
    """What a process would print.

    Unlike caplog it gets nothing from loggers that do not propagate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


async def test_the_log_names_what_is_wrong_with_a_backend_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Lines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [printed])
    async with serving(Keeping()) as endpoints:
        traces = to(f"{endpoints['http']}/elsewhere")
        await traces.start()
        work(traces)
        traces._provider.force_flush()
        await until(lambda: bool(printed.lines))
        await traces.shutdown(60)
    assert fates(traces) == {"sent": 0, "failed": 1, "dropped": 0}
    (line,) = printed.lines
    assert "/elsewhere/v1/traces does not exist (HTTP 404)" in line


@pytest.mark.skipif(bool(missing()), reason=MISSING + missing())
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_real_collector_takes_them_and_passes_them_on(tmp_path: Path, protocol: str) -> None:
    kept = Keeping()
    async with serving(kept) as endpoints, rotel(tmp_path, endpoints[protocol].replace("grpc:", "http:"), protocol) as ports:
        port = ports.grpc_port if protocol == "grpc" else ports.http_port
        traces = to(f"{protocol}://127.0.0.1:{port}")
        await traces.start()
        work(traces, times=3)
        await traces.shutdown(60)
        assert fates(traces) == {"sent": 3, "failed": 0, "dropped": 0}
        await until(lambda: arrived(kept) == [names.OWN_PUBLISH] * 3)


def arrived(kept: Keeping) -> list[str]:
    return [
        span.name
        for signal, payload in kept.taken
        if signal is Signal.TRACES
        for entry in ExportTraceServiceRequest.FromString(payload).resource_spans
        for scope in entry.scope_spans
        for span in scope.spans
    ]
