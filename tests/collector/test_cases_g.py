"""Cases of kind g that need a pipeline and a store.

Kind g is collector, sampling and backends. The other cases of this kind are with the exporter and the stitcher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.records import MS, exchange, split_request
from handrail.metrics.exponential_histogram import GapSketch
from handrail.otlp.decode import json_tree
from handrail.otlp.signals import Signal
from handrail.records import Exchange, Gaps, Outcome, Record, Role
from handrail.wire.exchange import to_span
from handrail_collector.counters import CounterKey
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.stitcher import SECOND, Stitcher, StitchSettings
from handrail_collector.store.read import StoreReader
from harness.pipelines import START, Clock, batch, proxies, running, send, stored, sweep, taken

REPLAY = Path(__file__).parents[1] / "data" / "replay"
AWAY_MS = (0, 200, -200, 2000, -2000, 5000, -5000, 86_400_000)


def case(name: str) -> Any:
    return json.loads((REPLAY / name).read_text())


# --- G01: spans later than the decision wait --------------------------------------------------------------------------------


@pytest.mark.parametrize("edge_known", [True, False], ids=["edge", "no_edge"])
@pytest.mark.parametrize("max_open_s", [3600, 30], ids=["waited_for", "bound_hit"])
async def test_G01_a_decode_exported_after_the_wait_is_part_of_the_one_record(
    tmp_path: Path, edge_known: bool, max_open_s: int
) -> None:
    given = case("join/G01_late_decode.json")
    clock = Clock()
    edge, p, d = proxies("req-a", "t1")
    long = [replace(each, duration_ns=given["decode_exported"] * SECOND) for each in (d, edge)]
    settings = StitchSettings(engine_wait_ns=given["decision_wait_s"] * SECOND, max_open_ns=max_open_s * SECOND)
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        clock.now = START + given["prefill_exported"] * SECOND
        await send(journal, [p])
        await taken(pipeline, journal)
        for second in range(given["prefill_exported"], given["decode_exported"]):
            clock.now = START + second * SECOND
            sweep(pipeline, clock.now)
        assert pipeline.stats.rows == (max_open_s < given["decode_exported"])
        clock.now = START + given["decode_exported"] * SECOND
        await send(journal, long if edge_known else long[:1], 5)
        await taken(pipeline, journal)
        for _ in range(60):
            clock.now += SECOND
            sweep(pipeline, clock.now)
    (row,) = stored(tmp_path)
    assert {join.evidence.partition(":")[0] for join in row.joins} == {"prefill", "decode", *(["edge"] if edge_known else [])}
    assert row.complete
    assert row.version == (2 if max_open_s < given["decode_exported"] else 1)


# --- G03: clock skew --------------------------------------------------------------------------------------------------------


async def test_G03_raw_times_are_kept_and_no_duration_changes(tmp_path: Path) -> None:
    given = case("otlp/G03_clock_skew.json")
    request = ParseDict(json_tree(json.dumps(given).encode()), ExportTraceServiceRequest())
    sent = {
        span.span_id.hex(): (span.start_time_unix_nano, span.end_time_unix_nano, span.parent_span_id.hex())
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.TRACES, request.SerializeToString())
        await taken(pipeline, journal)
        await pipeline.flush()
    reader = StoreReader(tmp_path / "store")
    request_row = replace(row_of_trace("0" * 31 + "b"), span_ids=tuple(sent))
    kept = {span.span_id: (span.start_unix_ns, span.end_unix_ns, span.parent_span_id) for span in reader.spans(request_row)}
    reader.close()
    assert kept == sent
    assert len(kept) == 6


def row_of_trace(trace_id: str) -> RequestRow:
    from builders.request_rows import ROWS

    return replace(ROWS["ordinary"], trace_id=trace_id, started_unix_ns=1_700_000_100 * SECOND)


def on_hosts(p_away_ms: int, d_away_ms: int) -> list[Record]:
    """Return one request on hosts whose clocks differ.

    P's and D's clocks show this much more than the edge's. The ids do not depend on it.
    """
    records = split_request("req-a", "t1", host_p="h-p", host_d="h-d")

    def away(record: Record, by_ms: int) -> Record:
        if isinstance(record, Exchange):
            return replace(record, arrival_unix_ns=record.arrival_unix_ns + by_ms * MS)
        assert record.end_unix_ns is not None
        return replace(record, start_unix_ns=record.start_unix_ns + by_ms * MS, end_unix_ns=record.end_unix_ns + by_ms * MS)

    ways = {Role.EDGE: 0, Role.PREFILL: p_away_ms, Role.DECODE: d_away_ms}
    return [away(record, ways[record.process.role]) for record in records.values()]


async def findings_of(root: Path, records: Sequence[Record]) -> tuple[RequestRow, Stitcher]:
    clock = Clock()
    async with running(root, clock) as (journal, pipeline):
        for record in records:
            if isinstance(record, Exchange):
                await journal.consume(Signal.TRACES, batch([record], 1, record.process.role.value))
            else:
                pipeline.stitcher.add(record, journal.end, clock.now)
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
    (row,) = stored(root)
    return row, pipeline.stitcher


@pytest.mark.parametrize("away_ms", AWAY_MS)
async def test_G03_no_phase_depends_on_what_the_hosts_clocks_show(tmp_path: Path, away_ms: int) -> None:
    straight, _ = await findings_of(tmp_path / "straight", on_hosts(0, 0))
    skewed, stitcher = await findings_of(tmp_path / "skewed", on_hosts(away_ms, -away_ms // 2))
    assert [replace(phase) for phase in skewed.phases] == list(straight.phases)
    assert all(phase.duration_ns >= 0 for phase in skewed.phases)
    assert (skewed.started_unix_ns, skewed.ttft_token_ns, skewed.duration_ns) == (
        straight.started_unix_ns,
        straight.ttft_token_ns,
        straight.duration_ns,
    )
    assert skewed.complete
    intervals = stitcher.clocks.intervals()
    assert {frozenset(pair) for pair in intervals} == {
        frozenset({a, b}) for a, b in (("h1", "h-p"), ("h1", "h-d"), ("h-p", "h-d"))
    }
    shows = {"h1": 0, "h-p": away_ms * MS, "h-d": -away_ms // 2 * MS}
    for (host, peer), interval in intervals.items():
        true = shows[peer] - shows[host]
        assert interval.low_ns is None or interval.low_ns <= true
        assert interval.high_ns is None or true <= interval.high_ns
        if "h1" in (host, peer):  # h1 called and answered; between P and D only this is known: D came after P
            assert interval.width_ns is not None


# --- G04: asynchronous or early-closing parent -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Span.SPAN_KIND_CONSUMER, Span.SPAN_KIND_PRODUCER, Span.SPAN_KIND_INTERNAL])
@pytest.mark.parametrize("at_ms", [650, -5000, 90_000])
async def test_G04_a_span_that_outlives_its_parent_moves_no_clock(
    tmp_path: Path, kind: Span.SpanKind.ValueType, at_ms: int
) -> None:
    clock = Clock()
    edge, p, d = proxies("req-a", "t1")
    p, d = (replace(each, process=replace(each.process, host=f"h-{each.process.role.value}")) for each in (p, d))
    transfer = Span(
        trace_id=bytes.fromhex(p.ids.trace_id),
        span_id=b"transfer",
        parent_span_id=bytes.fromhex(p.ids.span_id),
        name="kv.transfer",
        kind=kind,
        start_time_unix_nano=p.arrival_unix_ns + at_ms * MS,
        end_time_unix_nano=p.arrival_unix_ns + (at_ms + 1250) * MS,
    )
    known = []
    for with_transfer in (False, True):
        async with running(tmp_path / str(with_transfer), clock) as (journal, pipeline):
            await send(journal, [edge, p, d])
            if with_transfer:
                request = ExportTraceServiceRequest()
                scoped = request.resource_spans.add()
                scoped.resource.attributes.add(key="host.id").value.string_value = "h-other"
                scoped.scope_spans.add().spans.append(transfer)
                await journal.consume(Signal.TRACES, request.SerializeToString())
            await taken(pipeline, journal)
            sweep(pipeline, clock.now + 60 * SECOND)
            known.append((pipeline.stitcher.clocks.intervals(), [row.phases for row in pipeline.rows()]))
            assert not any(group.contradicting for group in pipeline.stitcher.open_groups())
    assert known[0] == known[1]


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_DISCONNECT, Outcome.TIMED_OUT, Outcome.UPSTREAM_DISCONNECT, Outcome.ABORTED])
@pytest.mark.parametrize("ended_ms", [20, 60, 109, 200, 700])
def test_G04_a_caller_that_left_early_says_nothing_of_when_it_was_answered(outcome: Outcome, ended_ms: int) -> None:
    """P and D go on after the caller has left.

    Their clocks are the edge's, and the interval must not exclude that.
    """
    edge = exchange(Role.EDGE, 0, ended_ms, ttft_ms=None, outcome=outcome)
    p = exchange(Role.PREFILL, 10, 100, parent=edge, host="h-p")
    d = exchange(Role.DECODE, 130, 860, parent=edge, host="h-d")
    stitcher = Stitcher()
    for offset, record in enumerate((edge, p, d)):
        stitcher.add(record, offset, START + 2 * SECOND)
    decisions = stitcher.sweep(START + 60 * SECOND)
    for interval in stitcher.clocks.intervals().values():
        assert interval.low_ns is None or interval.low_ns <= 0
        assert interval.high_ns is None or interval.high_ns >= 0
    assert not any(decision.group.contradicting for decision in decisions)


# --- G12: duplicate delivery -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True], ids=["same_process", "after_a_restart"])
async def test_G12_the_same_bytes_again_change_no_count_and_an_update_replaces(tmp_path: Path, restarted: bool) -> None:
    again_after_s = case("join/G12_replay_twice.json")["same_request_bytes_twice_after_s"]
    clock = Clock()
    records = proxies("req-a", "t1")
    payloads = [batch([record], 1, record.process.role.value) for record in records]
    longer = replace(records[0], duration_ns=records[0].duration_ns + SECOND)
    counts, spans = [], 0
    for life in range(2 if restarted else 1):
        async with running(tmp_path, clock) as (journal, pipeline):
            await taken(pipeline, journal)
            for turn in range(1 if restarted else 2):
                if life or turn:
                    clock.now += again_after_s * SECOND
                for payload in payloads:
                    await journal.consume(Signal.TRACES, payload)
                await taken(pipeline, journal)
                sweep(pipeline, clock.now + 5 * SECOND * (life + turn))
                await pipeline.flush()
                seen = pipeline.observed
                counts.append((seen[CounterKey.SPANS], seen[CounterKey.SPANS_STORED]))
            if life or not restarted:
                await journal.consume(Signal.TRACES, batch([longer], 2, "edge"))
                await taken(pipeline, journal)
                clock.now += 60 * SECOND
                sweep(pipeline, clock.now)
                await pipeline.flush()
                spans = pipeline.observed[CounterKey.SPANS]
                assert pipeline.observed[CounterKey.EDGE_REQUESTS] == 1
    assert counts == [(3, 3), (3, 3)]
    assert spans == 4
    (row,) = stored(tmp_path)
    assert row.duration_ns == longer.duration_ns
    reader = StoreReader(tmp_path / "store")
    (edge_span,) = [span for span in reader.spans(row) if span.span_id == longer.ids.span_id]
    reader.close()
    assert edge_span.end_unix_ns - edge_span.start_unix_ns == longer.duration_ns


# --- G14: one endless trace --------------------------------------------------------------------------------------------------


async def test_G14_an_endless_trace_starves_nobody_and_a_late_error_is_kept(tmp_path: Path) -> None:
    """An endless trace does not delay others, and a late error is kept.

    The test has a tenth of the case's spans and entries. Their session comes first, between and last.
    """
    given = case("otlp/G14_endless_trace.json")
    endless, many, late = given["traces"]
    spans, limit = endless["spans"] // 10, given["limits"]["entries"] // 10
    clock = Clock()
    settings = StitchSettings(max_links=limit, max_groups=limit, engine_wait_ns=given["limits"]["wait_s"] * SECOND)
    chunk = spans // (many["count"] // 10)
    slow = proxies(late["id"], late["id"])
    slow[0] = replace(slow[0], outcome=Outcome.STREAM_ERROR, duration_ns=round(late["root_end_s"] * SECOND))
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        await send(journal, slow[1:], 1)
        for n in range(many["count"]):
            if n % 10 == 0:
                await journal.consume(Signal.TRACES, session(n // 10 * chunk + 1, chunk))
            await send(journal, proxies(f"req-{n}", f"t{n}", at_ms=n), 10 + 10 * n)
        clock.now += round(late["root_end_s"] * SECOND)
        await send(journal, slow[:1], 5)
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
        assert len(pipeline.stitcher._joins._links) == limit
        assert pipeline.stitcher.stats.links_dropped == spans - 1 - limit  # its root has no parent
    rows = {row.client_request_id: row for row in stored(tmp_path)}
    assert len(rows) == given["expected"]["complete"] + 1
    assert all(row.complete for row in rows.values())
    assert {name for name, row in rows.items() if row.outcome != "ok"} == set(given["expected"]["kept_because_error"])


def session(first: int, count: int) -> bytes:
    """Return the spans of an agent's session, each below the one before."""
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add().scope_spans.add()
    for number in range(first, first + count):
        parent = (number - 1).to_bytes(8, "big") if number > 1 else b""
        scoped.spans.append(
            Span(
                trace_id=b"session-of-hours",
                span_id=number.to_bytes(8, "big"),
                parent_span_id=parent,
                name="agent",
                start_time_unix_nano=START,
            )
        )
    return request.SerializeToString()


# --- G09: traces too large --------------------------------------------------------------------------------------------------

SPANS_A_REQUEST = 3
SPAN_BYTES = 4096
"""More bytes than any span of ours has.

Edge, P and D of a request stay below 12 KiB; backends refuse traces of some MB.
"""


def streamed(chunks: int) -> list[Exchange]:
    """Return the proxies' records of a request with that many chunks.

    The gaps range from 1 ms to 20 s.
    """
    sketch = GapSketch()
    sketch.extend([MS * (1 + (number * 7919) % 20_000) for number in range(chunks)])
    gaps = Gaps(unit="chunk", count=chunks, sum_ns=sketch.sum_ns, max_ns=20_000 * MS, max_at_ns=1, sketch=sketch.encode())
    return [each if each.process.role is Role.PREFILL else replace(each, gaps=gaps) for each in proxies("req-a", "t1")]


async def test_g09_the_span_budget_of_a_request_does_not_grow_with_its_tokens(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        records = streamed(60_000)
        await send(journal, records)
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
    spans = [to_span(each) for each in records]
    assert len(spans) == SPANS_A_REQUEST
    assert max(len(span.SerializeToString()) for span in spans) < SPAN_BYTES
    assert [(len(span.events), len(span.links)) for span in spans] == [(0, 0)] * SPANS_A_REQUEST
    (row,) = stored(tmp_path)
    reader = StoreReader(tmp_path / "store")
    kept = reader.spans(row)
    reader.close()
    assert len(kept) == SPANS_A_REQUEST
    assert (row.complete, row.gap_count) == (True, 60_000)


def test_g09_ten_times_the_tokens_are_hardly_larger_spans() -> None:
    short, long = ([len(to_span(each).SerializeToString()) for each in streamed(chunks)] for chunks in (20_000, 200_000))
    assert all(more < 1.25 * less for less, more in zip(short, long, strict=True)), (short, long)
    assert max(long) < SPAN_BYTES


async def test_g09_requests_under_one_traceparent_keep_their_own_rows_and_spans(tmp_path: Path) -> None:
    """An agent's session is one trace, and each request keeps its own row and spans.

    This holds wherever its backend gives up.
    """
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        for number in range(40):
            await send(journal, proxies(f"turn-{number}", "t0", at_ms=5000 * number), 1 + 10 * number)
            await taken(pipeline, journal)
            clock.now += 5 * SECOND
            sweep(pipeline, clock.now)
        clock.now += 60 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
    rows = stored(tmp_path)
    assert len({row.trace_id for row in rows}) == 1
    assert {row.client_request_id for row in rows} == {f"turn-{number}" for number in range(40)}
    assert [len(row.span_ids) for row in rows] == [SPANS_A_REQUEST] * 40
    assert len({span_id for row in rows for span_id in row.span_ids}) == 40 * SPANS_A_REQUEST
    assert all(row.complete for row in rows)
