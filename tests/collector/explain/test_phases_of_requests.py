"""Phases of whole requests: what each source allows, and exact sums.

Sums are exact to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from builders.records import MS, engine, exchange, kv, process, split_request
from handrail.otlp.decode import decode
from handrail.otlp.signals import Signal
from handrail.phases import KV_AND_QUEUE
from handrail.records import EngineRequest, Exchange, Outcome, Record, Role
from handrail.wire.engines import load
from handrail_collector.explain.request.request_row import Fleet, explain
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.stitcher import SECOND, Stitcher

NOW = 1_700_000_010 * 10**9
REPLAY = Path(__file__).parents[2] / "data" / "replay" / "otlp" / "C23_two_roots.json"
FLEET = Fleet(frozenset({(Role.PREFILL, "proxy"), (Role.DECODE, "proxy")}))


def rows(records: Iterable[Record], fleet: Fleet = FLEET) -> list[RequestRow]:
    stitcher = Stitcher()
    for offset, record in enumerate(records):
        stitcher.add(record, offset, NOW)
    decided = {id(d.group): d.group for s in range(0, 1000, 50) for d in stitcher.sweep(NOW + s * SECOND)}
    return [explain(g, fleet) for g in decided.values() if g.merged_into is None]


def row_of(records: Iterable[Record], fleet: Fleet = FLEET) -> RequestRow:
    (row,) = rows(records, fleet)
    return row


def table(row: RequestRow) -> dict[tuple[str, str], float]:
    """Map (place, phase) to ms; add up one place's parts of ``unattributed``."""
    found: dict[tuple[str, str], float] = {}
    for p in row.phases:
        found[p.process, p.phase] = found.get((p.process, p.phase), 0) + p.duration_ns / MS
    return found


def total(row: RequestRow) -> int:
    return sum(p.duration_ns for p in row.phases)


def test_everything_seen() -> None:
    row = row_of(split_request().values())
    assert row.scope == "edge"
    assert row.phase_of == "ttft"
    assert total(row) == row.ttft_token_ns == 300 * MS
    assert table(row) == pytest.approx(
        {
            ("prefill", "prefill_admission"): 1,
            ("prefill", "prefill_queue"): 20,
            ("prefill", "prefill_compute"): 60,
            ("prefill", "prefill_respond"): 4,
            ("prefill", "unattributed"): 15,
            ("path", "router_and_hops"): 40,
            ("decode", "decode_admission"): 2,
            ("decode", "first_step"): 15,
            ("decode", "decode_respond"): 8,
            ("decode", "unattributed"): 135,
        }
    )
    kv_part = next(p for p in row.phases if p.process == "decode" and p.source == "otlp" and p.phase == "unattributed")
    assert kv_part.duration_ns == 100 * MS
    assert kv_part.may_be == tuple(p.value for p in KV_AND_QUEUE)
    assert row.complete
    assert row.kv_outcome == "unknown"  # proxies and spans cannot show that a fetch succeeded
    assert row.findings == ()


def test_no_kv_phase_is_ever_claimed_without_evidence_of_the_hand_off() -> None:
    row = row_of(split_request().values())
    assert not [p for p in row.phases if p.phase.startswith("kv_") or p.phase == "decode_queue"]


def test_inline_proxies_alone_know_the_time_inside_each_process_and_the_remainder() -> None:
    records = split_request()
    row = row_of(r for n, r in records.items() if not n.startswith("engine"))
    assert table(row) == {("prefill", "unattributed"): 100, ("path", "router_and_hops"): 40, ("decode", "unattributed"): 160}


def test_taps_alone_leave_the_http_front_ends_in_doubt() -> None:
    records = split_request()
    edge = records["edge"]
    engines = [
        replace(r, ids=replace(r.ids, parent_span_id=edge.ids.span_id)) for r in (records["engine_p"], records["engine_d"])
    ]
    row = row_of((edge, *engines))
    assert total(row) == 300 * MS
    between = next(p for p in row.phases if p.process == "path")
    assert between.phase == "unattributed"
    assert between.duration_ns == (300 - 95 - 150) * MS
    assert between.may_be == ("router_and_hops", "prefill_admission", "prefill_respond", "decode_admission", "decode_respond")
    assert row.complete


def test_a_silent_prefill_is_not_blamed_on_the_router() -> None:
    records = split_request()
    row = row_of((records["edge"], records["d"]))
    assert {p.phase for p in row.phases} == {"unattributed"}
    assert "prefill_compute" in next(p for p in row.phases if p.process == "path").may_be
    assert not row.complete


def test_a_silent_decode_neither() -> None:
    records = split_request()
    row = row_of((records["edge"], records["p"]))
    between = next(p for p in row.phases if p.process == "path")
    assert between.phase == "unattributed"
    assert "kv_transfer" in between.may_be
    assert not row.complete


def test_B04_ttft_is_the_clients_not_the_prefills() -> None:
    edge = exchange(Role.EDGE, 0, 2500, ttft_ms=1940)
    p = exchange(Role.PREFILL, 0, 600, parent=edge, kv_out=kv("a"))
    d = exchange(Role.DECODE, 600, 1800, parent=edge, kv_in=kv("a"), ttft_ms=1330)
    row = row_of((edge, p, d))
    assert row.ttft_token_ns == 1940 * MS
    assert table(row)["decode", "unattributed"] == 1330


def test_a_response_that_is_not_streamed_sums_to_its_whole_duration() -> None:
    records = split_request()
    edge, d = records["edge"], records["d"]
    assert isinstance(edge, Exchange)
    assert isinstance(d, Exchange)
    records["edge"] = replace(edge, stream=False, ttft_token_ns=None)
    records["d"] = replace(d, stream=False, ttft_token_ns=None)
    row = row_of(records.values())
    assert row.phase_of == "total"
    assert total(row) == row.duration_ns == 1000 * MS
    assert table(row)["decode", "decode_respond"] == pytest.approx(860 - 2 - 150)


def test_a_prefill_and_decode_that_overlap_are_not_added_up() -> None:
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=200)
    p = exchange(Role.PREFILL, 5, 150, parent=edge, kv_out=kv("a"))
    d = exchange(Role.DECODE, 10, 900, parent=edge, kv_in=kv("a"), ttft_ms=180)
    row = row_of((edge, p, d))
    assert total(row) == 200 * MS
    assert "prefill_decode_overlap" in row.findings
    assert not [p for p in row.phases if p.process == "prefill"]


def test_without_an_edge_the_scope_is_the_decodes() -> None:
    records = split_request()
    del records["edge"]
    row = row_of(records.values())
    assert row.scope == "decode"
    assert total(row) == row.ttft_token_ns == 160 * MS
    assert {p.process for p in row.phases} == {"decode"}


def test_an_engine_alone_is_engine_scope() -> None:
    row = row_of([engine(Role.DECODE, 0, 500, queue_ms=50, prefill_ms=20, ttft_ms=80)])
    assert row.scope == "engine"
    assert total(row) == 80 * MS
    assert row.output_tokens == 1


def test_a_collocated_request_lacks_the_hand_off_phases() -> None:
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=100)
    both = exchange(Role.COLLOCATED, 5, 990, parent=edge, ttft_ms=90)
    engine_request = engine(Role.COLLOCATED, 6, 985, parent=both, queue_ms=20, prefill_ms=50, ttft_ms=80)
    row = row_of((edge, both, engine_request))
    assert row.kv_outcome is None
    assert row.complete
    assert table(row)["decode", "prefill_compute"] == 50
    assert table(row)["decode", "prefill_queue"] == 20
    assert table(row)["path", "router_and_hops"] == 10


def test_C15_an_aborted_requests_absurd_figures_are_left_out() -> None:
    edge = exchange(Role.EDGE, 0, 420, ttft_ms=None, outcome=Outcome.CLIENT_DISCONNECT)
    engine_request = engine(
        Role.DECODE,
        10,
        400,
        parent=edge,
        outcome=Outcome.ABORTED,
        queue_ns=None,
        prefill_ns=None,
        ttft_ns=None,
        output_tokens=0,
        dropped_attributes=("gen_ai.latency.time_in_queue",),
    )
    row = row_of((edge, engine_request))
    assert row.phase_of == ""
    assert row.phases == ()
    assert row.outcome == "client_disconnect"
    assert any(f.startswith("bad_attribute") for f in row.findings)


# --- C23: two roots -----------------------------------------------------------------------------------------------------


def two_roots() -> EngineRequest:
    """Return the records of the case's two traces.

    The engine's span is a record; its HTTP server's span is none.
    """
    request = decode(Signal.TRACES, REPLAY.read_bytes(), "application/json")
    assert isinstance(request, ExportTraceServiceRequest)
    spans = [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    vllm = load("vllm")
    read = [vllm.read(span, process(Role.DECODE)) for span in spans if vllm.claims(span, "vllm.tracing.otel")]
    assert len(spans) == 2
    (record,) = read
    assert isinstance(record, EngineRequest)
    return record


def test_C23_an_engine_in_a_trace_of_its_own_is_part_of_the_request_around_it() -> None:
    engine_request = two_roots()
    edge = exchange(Role.EDGE, 0, 10_000, rid="R", ttft_ms=9_500, arrival_unix_ns=engine_request.start_unix_ns - 9 * SECOND)
    (row,) = rows([engine_request, edge])
    assert {(join.how, join.evidence) for join in row.joins} >= {("request_key", "decode:otlp")}
    assert (row.scope, row.duration_ns, row.ttft_token_ns) == ("edge", 10 * SECOND, 9_500 * MS)
    assert total(row) == 9_500 * MS


def test_C23_without_our_proxy_only_the_engines_second_is_reported() -> None:
    (row,) = rows([two_roots()])
    assert (row.scope, row.duration_ns) == ("engine", SECOND)


# --- C22: retries -------------------------------------------------------------------------------------------------------


def test_C22_a_failed_prefill_and_its_retry_are_attempts_of_one_request() -> None:
    edge = exchange(Role.EDGE, 0, 2000, ttft_ms=1000)
    failed = exchange(Role.PREFILL, 5, 5, parent=edge, status=502, outcome=Outcome.HTTP_ERROR, instance="p1:1")
    worked = exchange(Role.PREFILL, 20, 800, parent=edge, kv_out=kv("b"), instance="p1:1")
    d = exchange(Role.DECODE, 830, 1100, parent=edge, kv_in=kv("b"), ttft_ms=150)
    row = row_of((edge, failed, worked, d))
    assert row.prefill_attempts == 2
    assert table(row)["prefill", "unattributed"] == 800
    assert [f.split(":")[0] for f in row.findings] == ["prefill_retried"]


def test_C22_the_prefill_whose_kv_was_read_is_on_the_path() -> None:
    edge = exchange(Role.EDGE, 0, 130_000, ttft_ms=126_000)
    still_computing = exchange(Role.PREFILL, 5, 129_000, parent=edge, kv_out=kv("a"), instance="a:1")
    used = exchange(Role.PREFILL, 120_000, 5000, parent=edge, kv_out=kv("b"), instance="b:1")
    d = exchange(Role.DECODE, 125_100, 4000, parent=edge, kv_in=kv("b"), ttft_ms=800)
    row = row_of((edge, still_computing, used, d))
    assert row.prefill_instance == "b:1"
    assert table(row)["prefill", "unattributed"] == 5000


def test_C22_a_silent_fall_back_to_a_local_prefill_is_reported() -> None:
    edge = exchange(Role.EDGE, 0, 2000, ttft_ms=900)
    failed = exchange(Role.PREFILL, 5, 5, parent=edge, status=502, outcome=Outcome.HTTP_ERROR)
    d = exchange(Role.DECODE, 15, 1900, parent=edge, ttft_ms=880)
    row = row_of((edge, failed, d))
    assert row.kv_outcome == "fallback_local"
    assert any(f.startswith("fallback_local") for f in row.findings)
    assert not any(f.startswith("context_lost") for f in row.findings)


def test_A23_a_cache_probe_before_the_decode_is_not_the_answer() -> None:
    edge = exchange(Role.EDGE, 0, 3100, ttft_ms=950, output_tokens=120)
    probe = exchange(Role.DECODE, 0, 30, parent=edge, output_tokens=0, finish_reasons=("cache_threshold",))
    p = exchange(Role.PREFILL, 30, 870, parent=edge, kv_out=kv("a"))
    d = exchange(Role.DECODE, 900, 2200, parent=edge, kv_in=kv("a"), ttft_ms=50, output_tokens=120)
    row = row_of((probe, p, d, edge))
    assert row.outcome == "ok"
    assert row.output_tokens == 120
    assert row.prefill_attempts == 1
    assert table(row)["decode", "unattributed"] == 50


def test_models_that_differ_are_a_finding() -> None:
    edge = exchange(Role.EDGE, 0, 1000, ttft_ms=300, model="a")
    d = exchange(Role.DECODE, 100, 800, parent=edge, ttft_ms=100, model="b")
    assert "model_mismatch: a, b" in row_of((edge, d)).findings


def test_context_that_did_not_reach_an_engine_is_a_finding() -> None:
    edge = exchange(Role.EDGE, 0, 1000, rid="R", ttft_ms=300)
    d = engine(Role.DECODE, 100, 800, rid="cmpl-R-0", trace="other")
    row = row_of((edge, d))
    assert "context_lost: no trace context reached decode" in row.findings
    assert row.other_trace_ids == (d.ids.trace_id,)


@settings(max_examples=200, deadline=None)
@given(
    ttft=st.integers(0, 10**10),
    p_ns=st.integers(0, 10**10),
    d_ns=st.integers(0, 10**10),
    parts=st.lists(st.integers(0, 10**10), min_size=6, max_size=6),
    skew_ms=st.integers(-5000, 5000),
    missing=st.sets(st.sampled_from(["p", "d", "engine_p", "engine_d"])),
    stream=st.booleans(),
)
def test_whatever_the_evidence_says_the_sum_is_exact(
    ttft: int, p_ns: int, d_ns: int, parts: list[int], skew_ms: int, missing: set[str], stream: bool
) -> None:
    r = split_request(host_d="h2")
    edge, p, d = r["edge"], r["p"], r["d"]
    engine_p, engine_d = r["engine_p"], r["engine_d"]
    assert isinstance(edge, Exchange)
    assert isinstance(p, Exchange)
    assert isinstance(d, Exchange)
    assert isinstance(engine_p, EngineRequest)
    assert isinstance(engine_d, EngineRequest)
    r["edge"] = replace(edge, ttft_token_ns=ttft, duration_ns=ttft + 10**9, stream=stream)
    r["p"] = replace(p, duration_ns=p_ns)
    r["d"] = replace(d, ttft_token_ns=d_ns, duration_ns=d_ns + 5, arrival_unix_ns=d.arrival_unix_ns + skew_ms * MS)
    r["engine_p"] = replace(engine_p, queue_ns=parts[0], prefill_ns=parts[1], ttft_ns=parts[2])
    r["engine_d"] = replace(engine_d, queue_ns=parts[3], prefill_ns=parts[4], ttft_ns=parts[5])
    for row in rows(record for name, record in r.items() if name not in missing):
        if row.phase_of:
            expected = row.ttft_token_ns if row.phase_of == "ttft" else row.duration_ns
            if row.scope == "edge":
                assert total(row) == expected
            assert all(phase.duration_ns >= 0 for phase in row.phases)


def test_what_the_engine_did_not_time_is_not_pinned_on_its_doors() -> None:
    """Time that the engine did not measure is not attributed to admission or respond.

    Without durations from the engines (an abort, absurd values) it may be any phase of that process.
    """
    r = split_request()
    for name in ("engine_p", "engine_d"):
        record = r[name]
        assert isinstance(record, EngineRequest)
        r[name] = replace(record, queue_ns=None, prefill_ns=None)
    row = row_of(r.values())
    rest = {p.process: p.may_be for p in row.phases if p.phase == "unattributed"}
    assert rest["prefill"] == ("prefill_admission", "prefill_queue", "prefill_compute", "prefill_respond")
    assert set(rest["decode"]) >= {"decode_admission", "kv_transfer", "decode_queue", "first_step", "decode_respond"}
