"""Every engine adapter against recordings of the real engine.

The tests check what it claims and what it reads, and that no input makes it raise.
A registry entry without a recording fails here with the path to create: tests/data/recordings/otlp_raw/<name>.pb or the
recorded ``*.grpc.pb`` / ``*.http.pb`` of the engine, and tests/golden/engines/<adapter>.txt (written with --update).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.decode import decode
from handrail.otlp.signals import Signal
from handrail.records import EngineRequest, Outcome, Process, Record, Role, RouterCall
from handrail.wire.engines import REGISTRY, load, load_all
from handrail.wire.exchange import process_of

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = DATA / "recordings" / "otlp_raw"
ANYONE = Process(role=Role.UNKNOWN, instance="", host="")


def recorded() -> Iterator[tuple[Span, str, Process]]:
    for file in sorted(RECORDINGS.glob("*.pb")):
        request = ExportTraceServiceRequest.FromString(file.read_bytes())
        for resource_spans in request.resource_spans:
            process = process_of(resource_spans.resource)
            for scoped in resource_spans.scope_spans:
                for span in scoped.spans:
                    yield span, scoped.scope.name, process


def adapter_output(record: Record) -> str:
    """Return one line a record, without ids, since they are random."""
    parts = [type(record).__name__, record.process.service]
    if isinstance(record, EngineRequest):
        assert record.end_unix_ns is not None
        figures = ("ttft_ns", "e2e_ns", "queue_ns", "prefill_ns", "decode_ns", "prompt_tokens", "output_tokens", "max_tokens")
        parts += [record.request_id, *(f"{name}={getattr(record, name)}" for name in figures), record.outcome.value]
        parts += [f"lasts={record.end_unix_ns - record.start_unix_ns}", *record.dropped_attributes]
    elif isinstance(record, RouterCall):
        end = "no end" if record.end_unix_ns is None else f"lasts={record.end_unix_ns - record.start_unix_ns}"
        parts += [
            record.kind,
            str(record.phase and record.phase.value),
            str(record.peer),
            str(record.request_id),
            end,
            str(record.status),
        ]
    return " ".join(parts)


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_read_from_the_recordings(name: str, golden: Callable[[Path | str, str], None]) -> None:
    adapter = load(name)
    records = [adapter.read(span, process) for span, scope, process in recorded() if adapter.claims(span, scope)]
    lines = [adapter_output(r) for r in records if r is not None]
    assert lines, f"no recording for {name}: add one under {RECORDINGS.relative_to(DATA.parent)}"
    golden(f"engines/{name}.txt", "\n".join(lines) + "\n")


def test_at_most_one_adapter_claims_a_span() -> None:
    adapters = load_all()
    for span, scope, _ in recorded():
        assert sum(adapter.claims(span, scope) for adapter in adapters) <= 1


def test_start_up_spans_say_nothing_about_requests() -> None:
    starting = [(span, scope) for span, scope, _ in recorded() if span.name in ("Load model", "Worker init", "Overall Loading")]
    assert starting
    assert not any(adapter.claims(span, scope) for span, scope in starting for adapter in load_all())


def test_the_routers_late_client_ends_are_not_believed() -> None:
    adapter = load("vllm-router")
    calls = [adapter.read(span, process) for span, scope, process in recorded() if adapter.claims(span, scope)]
    clients = [c for c in calls if isinstance(c, RouterCall) and c.kind == "client"]
    assert clients
    assert all(c.end_unix_ns is None and c.phase in (Role.PREFILL, Role.DECODE) and c.peer for c in clients)
    assert all(c.end_unix_ns is not None for c in calls if isinstance(c, RouterCall) and c.kind == "server")


def test_C15_absurd_durations_are_dropped_and_named() -> None:
    span = _replayed("C15_aborted_bad_attrs.json")[0]
    record = load("vllm").read(span, ANYONE)
    assert isinstance(record, EngineRequest)
    assert record.dropped_attributes == ("gen_ai.latency.time_in_queue",)
    assert (record.queue_ns, record.prefill_ns, record.ttft_ns) == (None, None, None)
    assert record.e2e_ns == 420_000_000
    assert record.outcome is Outcome.ABORTED


def test_C17_bad_intervals_never_become_durations() -> None:
    starts_and_ends = []
    for span in _replayed("C17_bad_intervals.json"):
        named = Span()
        named.CopyFrom(span)
        named.name = "llm_request"
        entry = named.attributes.add()
        entry.key, entry.value.string_value = "gen_ai.request.id", "cmpl-R-0"
        record = load("vllm").read(named, ANYONE)
        assert isinstance(record, EngineRequest)
        starts_and_ends.append((record.start_unix_ns, record.end_unix_ns, record.dropped_attributes))
    assert starts_and_ends == [
        (1700000001000000000, None, ("endTimeUnixNano",)),
        (1700000001000000000, None, ()),
        (0, 1700000001000000000, ("startTimeUnixNano",)),
        (1700000001000000000, None, ("endTimeUnixNano",)),
    ]


@pytest.mark.parametrize("given", [None, "f" * 32], ids=["null", "a-string"])
def test_C04_attributes_that_are_named_like_ids_never_override_the_real_ones(given: str | None) -> None:
    for name in REGISTRY:
        adapter = load(name)
        span = Span()
        span.CopyFrom(next(span for span, scope, _ in recorded() if adapter.claims(span, scope)))
        before = adapter.read(span, ANYONE)
        for key in ("trace_id", "parent_id", "span_id", "parentSpanId"):
            entry = span.attributes.add(key=key)
            if given is not None:
                entry.value.string_value = given
        after = adapter.read(span, ANYONE)
        assert before is not None
        assert after == before
        assert (after.ids.trace_id, after.ids.parent_span_id) == (span.trace_id.hex(), span.parent_span_id.hex())


def test_a_failed_fetch_leaves_no_figures_behind() -> None:
    """A failed fetch leaves no figures.

    With policy ``fail`` the span has an unset status, no tokens, a queue time of 0, and a TTFT although no token was produced
    (measured).
    """
    span = Span(name="llm_request", kind=Span.SPAN_KIND_SERVER, start_time_unix_nano=10**18, end_time_unix_nano=10**18 + 10**8)
    for key, value in (("time_in_queue", 0.0), ("time_in_model_prefill", 0.0), ("time_to_first_token", 0.09), ("e2e", 0.09)):
        span.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = value
    span.attributes.add(key="gen_ai.request.id").value.string_value = "cmpl-f-blk-0"
    span.attributes.add(key="gen_ai.usage.completion_tokens").value.int_value = 0
    record = load("vllm").read(span, ANYONE)
    assert isinstance(record, EngineRequest)
    assert (record.ttft_ns, record.queue_ns, record.prefill_ns, record.outcome) == (None, None, None, Outcome.UNKNOWN)


def _replayed(name: str) -> list[Span]:
    request = decode(Signal.TRACES, (DATA / "replay" / "otlp" / name).read_bytes(), "application/json")
    assert isinstance(request, ExportTraceServiceRequest)
    return [span for rs in request.resource_spans for ss in rs.scope_spans for span in ss.spans]


@pytest.mark.parametrize("name", REGISTRY)
@given(data=st.data())
def test_nothing_makes_an_adapter_raise(name: str, data: st.DataObject) -> None:
    adapter = load(name)
    originals = [span for span, scope, _ in recorded() if adapter.claims(span, scope)]
    span = Span()
    span.CopyFrom(data.draw(st.sampled_from(originals)))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for attribute in span.attributes:
        kind = rng.choice(("keep", "text", "nan", "inf", "negative", "int", "none"))
        if kind == "text":
            attribute.value.string_value = rng.choice(("", "x", "-1", "9" * 40))
        elif kind in ("nan", "inf", "negative"):
            attribute.value.double_value = {"nan": float("nan"), "inf": float("inf"), "negative": -1e30}[kind]
        elif kind == "int":
            attribute.value.int_value = rng.randint(-(2**63), 2**63 - 1)
        elif kind == "none":
            attribute.ClearField("value")
    span.start_time_unix_nano = rng.choice((0, 1, 2**64 - 1, span.start_time_unix_nano))
    span.end_time_unix_nano = rng.choice((0, 1, 2**64 - 1, span.end_time_unix_nano))
    adapter.read(span, ANYONE)
