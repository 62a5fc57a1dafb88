"""Records straight to rows, as the collector makes them, without a journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bench.bench_pipeline import engine_span
from builders.records import EPOCH, MS, kv, split_request
from handrail.otlp.signals import Signal
from handrail.records import EngineRequest, Exchange, Role
from handrail.wire.engines.vllm import VllmAdapter
from handrail.wire.exchange import resource_of
from handrail_collector.batch import newest, publish, rows_of
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.read import StoreReader
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.observe import STARTED_UNIX_NS, EngineObservation, observe
from handrail_sim.emulator.virtual_run import VirtualRunSettings, fly
from handrail_sim.virtual.observers import TimedRecord, arrivals
from harness.pipelines import Clock, batch, running, stored, sweep, taken

SPLIT = scenarios.load("split")


def run(requests: int, *faults: str, scenario: str = "split", seed: int = 5) -> list[TimedRecord[Item]]:
    chosen = scenarios.load(scenario)
    parsed = tuple(parse(text, chosen.hosts()) for text in faults)
    flights = fly(VirtualRunSettings(scenario=chosen, requests=requests, seed=seed, faults=parsed))
    return arrivals(chosen, flights, parsed, seed=seed, started_unix_ns=EPOCH)


def rows(made: list[TimedRecord[Item]]) -> list[RequestRow]:
    return list(rows_of((one.received_unix_ns, one.record) for one in made))


def otlp(record: Item, number: int) -> bytes:
    if isinstance(record, Exchange):
        return batch([record], number, record.process.role.value)
    assert isinstance(record, EngineRequest)
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add(resource=resource_of(record.process)).scope_spans.add()
    scoped.spans.append(engine_span(record))
    return request.SerializeToString()


async def test_the_rows_are_those_of_the_pipeline_that_gets_the_same_by_otlp(tmp_path: Path) -> None:
    made = run(60, "fetch_recomputed:p0>d0:0.5")
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        for number, one in enumerate(made, 1):
            clock.now = one.received_unix_ns
            await journal.consume(Signal.TRACES, otlp(one.record, number))
        await taken(pipeline, journal)
        clock.now += 60 * SECOND
        sweep(pipeline, clock.now)
    request_rows = {row.client_request_id: row for row in stored(tmp_path)}
    reported_request_rows = {row.client_request_id: row for row in newest(rows(made))}
    assert reported_request_rows.keys() == request_rows.keys()
    assert len(reported_request_rows) == 60
    for request, row in reported_request_rows.items():
        same = replace(
            request_rows[request],
            first_offset=row.first_offset,
            last_offset=row.last_offset,
            model=row.model,
            joins=row.joins,
            span_ids=row.span_ids,
            findings=row.findings,
            version=row.version,
        )
        assert same == row
        assert {join.evidence: join.how for join in request_rows[request].joins} == {
            join.evidence: join.how for join in row.joins
        }


def test_a_span_of_a_request_that_was_never_scheduled_reads_as_the_reader_of_spans_has_it() -> None:
    chosen = scenarios.load("split")
    faults = (parse("fetch_failed:*:1", chosen.hosts()),)
    flights = fly(VirtualRunSettings(scenario=chosen, requests=3, faults=faults))
    (engine_observation,) = (
        one for one in observe(chosen, flights[0], faults) if isinstance(one, EngineObservation) and one.host[0] == "d"
    )
    span = Span(
        name="llm_request",
        start_time_unix_nano=engine_observation.arrival_unix_ns,
        end_time_unix_nano=engine_observation.end_unix_ns,
    )
    span.attributes.add(key="gen_ai.request.id").value.string_value = f"cmpl-{engine_observation.request_id}-0"
    span.attributes.add(key="gen_ai.usage.completion_tokens").value.int_value = engine_observation.completion_tokens
    span.attributes.add(key="gen_ai.usage.prompt_tokens").value.int_value = engine_observation.prompt_tokens
    for name, value in (
        ("time_to_first_token", engine_observation.ttft_ns),
        ("time_in_queue", engine_observation.queue_ns),
        ("time_in_model_prefill", engine_observation.prefill_ns),
        ("time_in_model_decode", engine_observation.decode_ns),
        ("e2e", engine_observation.end_unix_ns - engine_observation.arrival_unix_ns),
    ):
        span.attributes.add(key=f"gen_ai.latency.{name}").value.double_value = value / 1e9
    made = arrivals(chosen, flights[:1], faults, seed=0, started_unix_ns=STARTED_UNIX_NS)
    (ours,) = (one.record for one in made if isinstance(one.record, EngineRequest) and one.record.process.host[0] == "d")
    read = VllmAdapter().read(span, ours.process)
    assert isinstance(read, EngineRequest)
    assert replace(read, ids=ours.ids) == ours
    assert ours.dropped_attributes


def test_every_request_is_one_row_that_adds_up() -> None:
    reported_request_rows = rows(run(200))
    assert Counter(row.version for row in reported_request_rows) == {1: 200}
    assert all(row.complete and row.scope == "edge" for row in reported_request_rows)
    assert all(sum(phase.duration_ns for phase in row.phases) == row.ttft_token_ns for row in reported_request_rows)
    assert all(not row.findings for row in reported_request_rows)


def test_what_hangs_is_given_up_by_its_client_when_the_run_is_over() -> None:
    reported_request_rows = newest(rows(run(120, "kv_pressure:d0:0.999")))
    outcomes = Counter(row.outcome for row in reported_request_rows)
    assert outcomes["client_disconnect"] > 20
    assert outcomes["ok"] + outcomes["client_disconnect"] == 120
    hung = [row for row in reported_request_rows if row.outcome == "client_disconnect"]
    assert all(row.decode_host == "d0" and row.ttft_token_ns is None for row in hung)


def test_a_router_that_traces_is_on_the_path(tmp_path: Path) -> None:
    file = tmp_path / "traced.yaml"
    file.write_text("prefill-hosts: 1\nrouter-traces: true\n", encoding="utf-8")
    reported_request_rows = rows(run(20, "clock_offset:router:3", scenario=str(file)))
    assert len(reported_request_rows) == 20
    assert all(row.router_instance == "router:8000" and row.complete for row in reported_request_rows)
    assert all(
        len(row.joins) == 8 for row in reported_request_rows
    )  # three proxies, two engines, and the router's span with its two calls


def test_a_clock_that_is_wrong_moves_no_join() -> None:
    healthy = {row.client_request_id: row for row in rows(run(150))}
    wrong = {
        row.client_request_id: row for row in rows(run(150, "clock_offset:d0:-2", "clock_offset:p1:2", "clock_offset:edge:2"))
    }
    assert wrong.keys() == healthy.keys()
    assert all(wrong[request].phases == row.phases for request, row in healthy.items())


def test_a_prefill_whose_decode_never_comes_is_reported_in_the_end() -> None:
    reported_request_rows = rows_of([(EPOCH + 100 * MS, split_request()["p"])])
    assert [(row.scope, row.decode_host) for row in reported_request_rows] == [("engine", None)]


def test_late_evidence_makes_a_version_and_withdraws_what_it_takes_in() -> None:
    made = split_request()
    late = [(EPOCH + 2000 * MS, made[name]) for name in ("edge", "p", "engine_p")]
    answering = made["d"]
    assert isinstance(answering, Exchange)
    decode = replace(
        answering, ids=replace(answering.ids, trace_id="f" * 32, parent_span_id=""), kv_in=kv("cmpl-req-a-0-0000aaaa")
    )
    engine = replace(made["engine_d"], ids=replace(made["engine_d"].ids, trace_id="f" * 32))
    late += [(EPOCH + 40_000 * MS, decode), (EPOCH + 40_000 * MS, engine)]
    reported_request_rows = list(rows_of(late))
    assert [row.version for row in reported_request_rows if row.scope != MERGED] == [1, 2]
    (row,) = newest(reported_request_rows)
    assert row.complete
    assert row.decode_host == "h1"


def test_a_store_has_them_all(tmp_path: Path) -> None:
    made = rows(run(50))
    assert publish(tmp_path, made[:20]) == 20
    assert publish(tmp_path, made[20:]) == 30  # an existing store is added to
    reader = StoreReader(tmp_path / "store")
    try:
        found = reader.requests(RequestFilter(limit=1000))
    finally:
        reader.close()
    key = lambda row: row.request_id  # noqa: E731
    assert sorted((replace(row, first_offset=0, last_offset=0) for row in found), key=key) == sorted(
        (replace(row, first_offset=0, last_offset=0) for row in made), key=key
    )


def test_ids_and_times_are_those_of_the_seed() -> None:
    assert run(20) == run(20)
    assert run(20) != run(20, seed=6)
    roles = Counter(one.record.process.role for one in run(20))
    assert roles == {Role.EDGE: 20, Role.PREFILL: 40, Role.DECODE: 40}
