"""Hypothesis strategies for all values of a request row or a stored span."""

from __future__ import annotations

from hypothesis import strategies as st

from handrail.phases import Phase
from handrail_collector.rows import JoinRow, PhaseRow, RequestRow
from handrail_collector.store.tables.spans import SpanEvent, SpanLink, SpanRow

INT64 = st.integers(-(2**63), 2**63 - 1)
NS = st.integers(0, 2**62)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = st.sampled_from(["a", "b", "=", "\\", "a=b", "cmpl-a", "cmpl-b-0", "", "é", "ab"])
SPAN_ID = st.binary(min_size=8, max_size=8).map(bytes.hex)
TRACE_ID = st.binary(min_size=16, max_size=16).map(bytes.hex)

_scalars = st.one_of(TEXT, st.booleans(), INT64, st.floats(allow_nan=False), st.binary(max_size=5), st.none())
KEYS = st.sampled_from(["a", "b", "A", "a.b", "$bytes", "$map", "gen_ai.latency.e2e", "handrail.request.id", "x-y", "ä"]) | TEXT
VALUES = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
ATTRIBUTES = st.dictionaries(KEYS, VALUES, max_size=6)

phases = st.builds(
    PhaseRow,
    phase=st.sampled_from([phase.value for phase in Phase]),
    duration_ns=INT64.map(lambda value: value // 64),  # a sum over the phases of one name fits
    process=st.sampled_from(["prefill", "decode", "path"]),
    source=TEXT,
    bound_ns=NS,
    may_be=st.lists(st.sampled_from([phase.value for phase in Phase]), max_size=3).map(tuple),
)
joins = st.builds(JoinRow, evidence=TEXT, how=TEXT, span_id=SPAN_ID)
texts = st.lists(TEXT, max_size=3).map(tuple)

request_rows = st.builds(
    RequestRow,
    request_id=SPAN_ID,
    version=INT32,
    scope=TEXT,
    trace_id=TRACE_ID,
    other_trace_ids=st.lists(TRACE_ID, max_size=2).map(tuple),
    client_request_id=st.none() | TEXT | WORDS,
    request_key=st.none() | TEXT | WORDS,
    response_id=st.none() | TEXT | WORDS,
    model=st.none() | TEXT,
    operation=st.none() | TEXT,
    path=st.none() | TEXT,
    stream=st.none() | st.booleans(),
    started_unix_ns=NS,
    ttfb_ns=st.none() | INT64,
    ttft_token_ns=st.none() | INT64,
    ttft_text_ns=st.none() | INT64,
    duration_ns=INT64,
    outcome=TEXT,
    error_type=st.none() | TEXT,
    status=st.none() | INT32,
    prompt_tokens=st.none() | INT64,
    output_tokens=st.none() | INT64,
    cached_tokens=st.none() | INT64,
    prefill_attempts=INT32,
    gap_buckets=st.lists(INT32, max_size=3).map(tuple),
    gap_counts=st.lists(INT32, max_size=3).map(tuple),
    phases=st.lists(phases, max_size=6).map(tuple),
    joins=st.lists(joins, max_size=4).map(tuple),
    findings=texts,
    hints=texts,
    complete=st.booleans(),
    span_ids=st.lists(SPAN_ID, max_size=4).map(tuple),
    first_offset=INT64,
    last_offset=INT64,
    **{
        name: st.none() | TEXT
        for name in ("edge_instance", "router_instance", "prefill_instance", "decode_instance", "prefill_host", "decode_host")
    },
    kv_outcome=st.none() | TEXT,
    gap_unit=st.none() | TEXT,
    phase_of=TEXT,
    **{name: st.none() | INT64 for name in ("gap_count", "gap_max_ns", "gap_p50_ns", "gap_p99_ns", "gap_sum_ns", "gap_min_ns")},
)

span_rows = st.builds(
    SpanRow,
    offset=NS,
    trace_id=TRACE_ID,
    span_id=SPAN_ID,
    parent_span_id=st.just("") | SPAN_ID,
    name=TEXT,
    kind=st.integers(0, 5),
    start_unix_ns=NS,
    end_unix_ns=NS,
    status=st.integers(0, 2),
    status_message=TEXT,
    flags=st.integers(0, 2**32 - 1),
    trace_state=TEXT,
    role=TEXT,
    instance=TEXT,
    service=TEXT,
    scope=TEXT,
    resource=ATTRIBUTES,
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(SpanEvent, name=TEXT, time_unix_ns=NS, attributes=ATTRIBUTES), max_size=2).map(tuple),
    links=st.lists(st.builds(SpanLink, trace_id=TRACE_ID, span_id=SPAN_ID, attributes=ATTRIBUTES), max_size=2).map(tuple),
    raw_bytes=st.integers(0, 2**31 - 1),
)
