"""From journal through stitching to the store.

The tests cover what is stored once, what a restart does not repeat, and what is answered before it is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.records import MS, engine, exchange, split_request
from doubles.failing_files import KINDS, NAMES, FailingFiles
from handrail.conventions import SCOPE_PROXY
from handrail.otlp.signals import ReceiverUnavailable, Signal
from handrail.records import Exchange, Gaps, Record, Role
from handrail.wal.filesystem import OsFiles
from handrail.wal.log import FolderGoneError
from handrail.wire.exchange import resource_of, to_span
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.pipeline import REQUESTS_A_SLICE, Pipeline
from handrail_collector.stitch.stitcher import SECOND, StitchSettings
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from harness.pipelines import START, Clock, batch, proxies, running, send, stored, sweep, taken, until


async def test_a_request_comes_out_once_with_its_spans(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        assert [r.version for r in pipeline.rows()] == [0]  # open, answered as provisional
        clock.now += 30 * SECOND
        await journal.consume(Signal.TRACES, batch([exchange(Role.EDGE, 0, 1, rid="later", trace="t9")], 99, "other"))
        await taken(pipeline, journal)
        await pipeline.flush()
        row = stored(tmp_path)[0]
        assert (row.client_request_id, row.version, row.complete) == ("req-a", 1, True)
        reader = StoreReader(tmp_path / "store")
        assert sorted(s.name for s in reader.spans(row)) == ["decode", "handrail.request", "prefill"]
        reader.close()


async def test_others_run_between_the_slices_of_a_sweep(tmp_path: Path) -> None:
    """A thousand requests that are due at once hold the loop for a slice at a time."""
    clock, turns = Clock(), 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running(tmp_path, clock) as (journal, pipeline):
        records = [exchange(Role.PREFILL, n, 10, rid=f"r{n}", trace=f"t{n}") for n in range(1000)]
        await journal.consume(Signal.TRACES, batch(records))
        await taken(pipeline, journal)
        clock.now += 3600 * SECOND
        turning = asyncio.create_task(turn())
        await until(lambda: pipeline.stats.rows > 0)
        before = turns
        await until(lambda: pipeline.stats.rows == 1000)
        turning.cancel()
        assert turns - before >= (1000 - REQUESTS_A_SLICE) // REQUESTS_A_SLICE


async def test_G12_what_is_delivered_again_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    records = proxies("req-a", "t1")
    async with running(tmp_path, clock) as (journal, pipeline):
        for _ in range(3):
            await send(journal, records)  # the same batches: recognized by sender and number
        for number, record in enumerate(records, 50):
            await journal.consume(Signal.TRACES, batch([record], number, "tap"))  # recognized as duplicates by their bytes
            await journal.consume(Signal.TRACES, batch([record], None, ""))
        clock.now += 30 * SECOND
        await journal.consume(Signal.TRACES, batch([exchange(Role.EDGE, 0, 1, rid="later", trace="t9")], 99, "other"))
        await taken(pipeline, journal)
        await pipeline.flush()
    assert len([r for r in stored(tmp_path) if r.client_request_id == "req-a"]) == 1
    assert pipeline.stats.spans == 3 + 1
    assert pipeline.stats.spans_stored == 3 + 1
    assert pipeline.intake.duplicates.batches == 6
    assert pipeline.intake.duplicates.spans == 6


async def test_a_restart_says_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    """A restart repeats nothing and loses nothing.

    The collector stops after every entry. In the end each request has one row and each span one place, whatever was published
    by then.
    """
    clock = Clock()
    everything = [record for n in range(4) for record in proxies(f"req-{n}", f"t{n}", at_ms=n * 40)]
    for number, record in enumerate(everything, 1):
        async with running(tmp_path, clock, stitch=StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)) as (
            journal,
            pipeline,
        ):
            await send(journal, [record], number)
            await taken(pipeline, journal)
            clock.now += (number % 3) * SECOND
        # a stop publishes what was decided
    clock.now += 60 * SECOND
    async with running(tmp_path, clock) as (journal, pipeline):
        await send(journal, [exchange(Role.EDGE, 0, 1, rid="later", trace="t9")], 99)
        await taken(pipeline, journal)
    rows = [r for r in stored(tmp_path) if r.client_request_id != "later"]
    assert sorted(r.client_request_id or "" for r in rows) == [f"req-{n}" for n in range(4)]
    assert all({j.evidence for j in r.joins} == {"edge:proxy", "prefill:proxy", "decode:proxy"} for r in rows)
    reader = StoreReader(tmp_path / "store")
    spans = [s.span_id for r in rows for s in reader.spans(r)]
    reader.close()
    assert sorted(spans) == sorted(r.ids.span_id for r in everything)


async def test_evidence_that_comes_after_a_restart_makes_a_new_version_of_the_published_row(tmp_path: Path) -> None:
    clock = Clock()
    edge, p, d = proxies("req-a", "t1")
    settings = StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        await send(journal, [p, d])
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        await send(journal, [exchange(Role.EDGE, 0, 1, rid="later", trace="t9")], 90)
        await taken(pipeline, journal)
    (request_row,) = [r for r in stored(tmp_path) if r.client_request_id == "req-a"]
    assert request_row.scope == "decode"
    clock.now += 2 * SECOND
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        await send(journal, [edge], 40)
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        await send(journal, [exchange(Role.EDGE, 0, 1, rid="later2", trace="t8")], 91)
        await taken(pipeline, journal)
    (row,) = [r for r in stored(tmp_path) if r.client_request_id == "req-a"]
    assert (row.scope, row.request_id, row.version) == ("edge", request_row.request_id, request_row.version + 1)


async def test_two_rows_that_turn_out_to_be_one_request_become_one(tmp_path: Path) -> None:
    """Two published rows become one request.

    They are the edge's row and D's row. Then the router's span shows that D was called for the edge.
    """
    clock = Clock()
    edge = exchange(Role.EDGE, 0, 1000, rid="req-a", trace="t1", ttft_ms=300)
    foreign = "f" * 16
    d = exchange(Role.DECODE, 100, 800, rid="other-id", ttft_ms=100)
    d = replace(d, ids=replace(d.ids, trace_id=edge.ids.trace_id, parent_span_id=foreign))
    settings = StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        await send(journal, [edge, d])
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        assert sorted(r.scope for r in stored(tmp_path)) == ["decode", "edge"]
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.append(
            Span(
                trace_id=bytes.fromhex(edge.ids.trace_id),
                span_id=bytes.fromhex(foreign),
                parent_span_id=bytes.fromhex(edge.ids.span_id),
                name="router",
                start_time_unix_nano=START,
            )
        )
        await journal.consume(Signal.TRACES, request.SerializeToString())
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        await pipeline.flush()
        (row,) = stored(tmp_path)
        assert (row.scope, row.version) == ("edge", 2)
        assert {j.evidence for j in row.joins} == {"edge:proxy", "decode:proxy"}
        reader = StoreReader(tmp_path / "store")
        assert reader.count(RequestFilter()) == 1
        assert reader.find("other-id") == []
        assert [r.version for r in reader.find("req-a")] == [2]
        reader.close()


async def test_a_publish_in_the_middle_of_a_large_entry_stores_no_span_twice(tmp_path: Path) -> None:
    """A publish in the middle of a large entry stores no span twice.

    The entry's spans go to the store together, whatever the pipeline does between its slices. A replay adds none.
    """
    clock = Clock()
    records = [exchange(Role.EDGE, n, 10, rid=f"req-{n}", trace=f"t{n}") for n in range(2000)]
    publisher = StorePublisher(tmp_path / "store")
    recovered = publisher.open()
    journal = Journal(JournalSettings(folder=tmp_path / "journal").open_log(), now_unix_ns=clock)
    pipeline = Pipeline(journal, publisher, recovered, now_unix_ns=clock)
    await journal.start()
    await journal.consume(Signal.TRACES, batch(records))
    task = asyncio.create_task(pipeline.run())
    await until(lambda: pipeline.stitcher.stats.records >= 200)
    assert pipeline.stitcher.stats.records < 2000  # in the middle of it
    await pipeline.flush()
    task.cancel()  # as kill -9 would
    await asyncio.gather(task, return_exceptions=True)
    await journal.shutdown()
    publisher.close()
    async with running(tmp_path, clock) as (journal, pipeline):
        await taken(pipeline, journal)
    reader = StoreReader(tmp_path / "store")
    files = [f for p in reader.snapshot().publishes for f in p.files if f.table is Table.SPANS]
    assert sum(f.rows for f in files) == 2000
    reader.close()


async def test_what_no_column_takes_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A value that no column takes is left out, and the rest goes on.

    Times, counts and sketches may come from any sender. The readers bound the values that they know; another odd value costs
    itself alone.
    """
    clock = Clock()
    span = Span(
        trace_id=b"\1" * 16,
        span_id=b"\1" * 8,
        name="llm_request",
        start_time_unix_nano=2**64 - 1,
        end_time_unix_nano=2**64 - 1,
    )
    span.attributes.add(key="gen_ai.request.id").value.string_value = "cmpl-x-0"
    span.attributes.add(key="gen_ai.usage.completion_tokens").value.double_value = 1e300
    poison = ExportTraceServiceRequest()
    poison.resource_spans.add().scope_spans.add().spans.append(span)
    edge, p, d = proxies("req-a", "t1")
    unreadable = Gaps(unit="chunk", count=3, sum_ns=3, max_ns=1, max_at_ns=1, sketch=b"\xff newer")
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.TRACES, poison.SerializeToString())
        await send(journal, [replace(edge, gaps=unreadable, status=2**31), p, d])
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
        odd = replace(pipeline.buffer.waiting.requests[0], request_id="f" * 16, status="no number")  # no column takes this value
        pipeline.buffer.waiting.requests.append(odd)
        await pipeline.flush()
        assert pipeline.stats.failing == 0
        assert pipeline.stats.faults == 1
    rows = {r.client_request_id: r for r in stored(tmp_path)}
    assert set(rows) == {"req-a", None}
    assert (rows["req-a"].status, rows["req-a"].gap_count, rows["req-a"].gap_p99_ns) == (None, 3, None)


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
@pytest.mark.parametrize("operation", ["write", "open_append", "rename", "fdatasync", "fsync_dir", "truncate"])
async def test_a_failing_disk_is_retried_and_reported(operation: str, code: int, tmp_path: Path) -> None:
    clock, files = Clock(), FailingFiles(OsFiles())
    async with running(tmp_path, clock, files=files) as (journal, pipeline):
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        files.failing = {operation: code}
        await pipeline.flush()
        assert (pipeline.stats.failing, pipeline.stats.spans_stored) == (1, 0)
        assert journal.healthy
        files.failing = {}
        await pipeline.flush()
        assert (pipeline.stats.failing, pipeline.stats.spans_stored) == (0, 3)


@pytest.mark.parametrize("lost", ["store", "store/manifest.jsonl"])
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
async def test_a_store_that_is_gone_ends_the_pipeline_and_nothing_more_is_acknowledged(
    lost: str, again: bool, tmp_path: Path
) -> None:
    gone = tmp_path / lost
    async with AsyncExitStack() as stack:
        journal, pipeline = await stack.enter_async_context(_gone(tmp_path))
        await send(journal, proxies("req-a", "t1"))
        await taken(pipeline, journal)
        gone.rename(tmp_path / "away")
        if again:
            gone.mkdir() if lost == "store" else gone.touch()
        with pytest.raises(FolderGoneError):
            await pipeline.flush()
        assert journal.lost == f"the store is gone: [Errno 2] deleted or replaced while in use: {str(gone)!r}"
        await asyncio.wait_for(journal.gone(), 60)
        with pytest.raises(ReceiverUnavailable, match="the store is gone"):
            await send(journal, proxies("req-b", "t2"))
        assert list((tmp_path / "store").rglob("*.parquet")) == []


@asynccontextmanager
async def _gone(root: Path) -> AsyncIterator[tuple[Journal, Pipeline]]:
    """Yield a collector whose pipeline ends because its store is gone."""
    stack = AsyncExitStack()
    yield await stack.enter_async_context(running(root, Clock()))
    with pytest.raises(FolderGoneError):
        await stack.aclose()


async def test_a_request_completed_late_counts_as_joined(tmp_path: Path) -> None:
    clock = Clock()
    edge, p, d = proxies("req-a", "t1")
    settings = StitchSettings(engine_wait_ns=SECOND, settle_ns=SECOND // 2)
    async with running(tmp_path, clock, stitch=settings) as (journal, pipeline):
        await send(journal, [edge, p])
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        assert (pipeline.stats.edge_rows, pipeline.stats.edge_complete) == (1, 0)
        await send(journal, [d], 9)
        await taken(pipeline, journal)
        clock.now += 5 * SECOND
        sweep(pipeline, clock.now)
        assert (pipeline.stats.edge_rows, pipeline.stats.edge_complete) == (1, 1)


async def test_rows_decided_while_nothing_comes_are_published_too(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (journal, pipeline):
        for n in range(3):
            await send(journal, proxies(f"req-{n}", f"t{n}", at_ms=n), 1 + 10 * n)
        await taken(pipeline, journal)
        await pipeline.flush()
        assert stored(tmp_path) == []
        for wait in (13, 40):
            clock.now += wait * SECOND
            sweep(pipeline, clock.now)
            await pipeline.flush()  # twice with the same empty offset range
        assert len(stored(tmp_path)) == 3


async def test_G09_a_session_long_trace_is_not_one_request(tmp_path: Path) -> None:
    """A long session's trace is not one request.

    6000 foreign spans under one trace and 25 requests beside them give 25 rows, in bounded memory.
    """
    clock = Clock()
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add().scope_spans.add()
    trace = bytes.fromhex(b"t0".hex().rjust(32, "0"))
    parent = b""
    for number in range(1, 6001):
        span_id = number.to_bytes(8, "big")
        scoped.spans.append(
            Span(trace_id=trace, span_id=span_id, parent_span_id=parent, name="agent", start_time_unix_nano=START)
        )
        parent = span_id
    async with running(tmp_path, clock, stitch=StitchSettings(max_links=1000)) as (journal, pipeline):
        await journal.consume(Signal.TRACES, request.SerializeToString())
        for n in range(25):
            await send(journal, proxies(f"req-{n}", "t0", at_ms=n), 1 + 10 * n)
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
        assert len(pipeline.stitcher._joins._links) <= 1000
        assert len([r for r in pipeline.rows() if r.complete]) == 25


async def test_an_engines_own_export_without_any_sidecar_is_welcome(tmp_path: Path) -> None:
    clock = Clock()
    engine_request = engine(Role.UNKNOWN, 0, 80)
    request = ExportTraceServiceRequest()
    scoped = request.resource_spans.add().scope_spans.add()
    scoped.scope.name = "vllm.tracing.otel"
    span = Span(
        trace_id=bytes.fromhex(engine_request.ids.trace_id),
        span_id=bytes.fromhex(engine_request.ids.span_id),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=START,
        end_time_unix_nano=START + 80 * MS,
    )
    span.attributes.add(key="gen_ai.request.id").value.string_value = "cmpl-x-0"
    scoped.spans.append(span)
    async with running(tmp_path, clock) as (journal, pipeline):
        await journal.consume(Signal.TRACES, request.SerializeToString())
        await taken(pipeline, journal)
        clock.now += 30 * SECOND
        sweep(pipeline, clock.now)
        (row,) = pipeline.rows()
        assert (row.scope, row.request_key, row.phase_of) == ("engine", "x", "")


FUZZ_INTS = (0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63))
FUZZ_FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e300, 0.5)
FUZZ_TEXTS = ("", "a", "x" * 3000, "\0", "=", "9" * 18, "req-a")
FUZZ_TIMES = (0, 1, START, START + SECOND, 2**63, 2**64 - 1)


def spoiled(record: Record, data: st.DataObject) -> Span:
    """Return a span of Handrail or vLLM with absurd values in place of its own."""
    if isinstance(record, Exchange):
        span = to_span(record)
    else:
        span = Span(name="llm_request", trace_id=bytes.fromhex(record.ids.trace_id), span_id=bytes.fromhex(record.ids.span_id))
        for name in ("gen_ai.request.id", "gen_ai.latency.e2e", "gen_ai.latency.time_in_queue", "gen_ai.usage.completion_tokens"):
            span.attributes.add(key=name).value.string_value = "cmpl-req-a-0"
    for attribute in span.attributes:
        kind = data.draw(st.sampled_from(("keep", "keep", "keep", "int", "float", "text", "bytes", "none")))
        if kind == "int":
            attribute.value.int_value = data.draw(st.sampled_from(FUZZ_INTS))
        elif kind == "float":
            attribute.value.double_value = data.draw(st.sampled_from(FUZZ_FLOATS))
        elif kind == "text":
            attribute.value.string_value = data.draw(st.sampled_from(FUZZ_TEXTS))
        elif kind == "bytes":
            attribute.value.bytes_value = b"\xff\x00"
        elif kind == "none":
            attribute.ClearField("value")
    span.start_time_unix_nano = data.draw(st.sampled_from((*FUZZ_TIMES, span.start_time_unix_nano)))
    span.end_time_unix_nano = data.draw(st.sampled_from((*FUZZ_TIMES, span.end_time_unix_nano)))
    return span


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_comes_the_pipeline_goes_on(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("fuzz")

    async def run() -> None:
        clock = Clock()
        async with running(root, clock) as (journal, pipeline):
            for number, record in enumerate(split_request("req-a", "t1").values(), 1):
                request = ExportTraceServiceRequest()
                scoped = request.resource_spans.add(resource=resource_of(record.process)).scope_spans.add()
                scoped.scope.name = SCOPE_PROXY if isinstance(record, Exchange) else "vllm.tracing.otel"
                scoped.spans.extend((spoiled(record, data), spoiled(record, data)))
                await journal.consume(Signal.TRACES, request.SerializeToString())
                clock.now += number * SECOND
            await taken(pipeline, journal)
            clock.now += 1000 * SECOND
            sweep(pipeline, clock.now)
            pipeline.rows()
            await pipeline.flush()
            assert (pipeline.stats.faults, pipeline.stats.failing) == (0, 0)
            assert pipeline.stats.rows > 0 or pipeline.intake.reader.unreadable > 0

    asyncio.run(run())
