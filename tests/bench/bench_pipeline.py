"""Measure how many spans a second the pipeline stitches, explains and stores.

The pipeline runs alone, on a prepared journal.
A request has five spans: proxies at edge, P and D, and vLLM's own span at P and D. They are interleaved in the batches of their
senders.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.records import split_request
from handrail.conventions import BATCH_SEQ, SCOPE_PROXY
from handrail.metrics.exponential_histogram import GapSketch
from handrail.otlp.signals import KIND_OF_SIGNAL, Signal
from handrail.records import EngineRequest, Exchange, Gaps, Process, Record
from handrail.wire.exchange import resource_of, to_span
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.pipeline import Pipeline
from handrail_collector.store.publish import StorePublisher

REQUESTS = 4000
REPEATS = 3
BUDGET_SPANS_PER_S = 50_000
SECOND = 10**9
BATCH = 100


def engine_span(record: EngineRequest) -> Span:
    """Build the span that vLLM would send: its attributes, in seconds."""
    assert record.end_unix_ns is not None
    span = Span(
        trace_id=bytes.fromhex(record.ids.trace_id),
        span_id=bytes.fromhex(record.ids.span_id),
        parent_span_id=bytes.fromhex(record.ids.parent_span_id),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        flags=768,
        start_time_unix_nano=record.start_unix_ns,
        end_time_unix_nano=record.end_unix_ns,
    )
    seconds = {"time_to_first_token": record.ttft_ns, "e2e": record.e2e_ns, "time_in_queue": record.queue_ns}
    seconds |= {
        "time_in_model_prefill": record.prefill_ns,
        "time_in_model_decode": 0,
        "time_in_model_inference": record.prefill_ns,
    }
    for name, value in seconds.items():
        span.attributes.add(key=f"gen_ai.latency.{name}").value.double_value = (value or 0) / 1e9
    for name, number in (
        ("usage.prompt_tokens", 120),
        ("usage.completion_tokens", 24),
        ("request.max_tokens", 24),
        ("request.n", 1),
    ):
        span.attributes.add(key=f"gen_ai.{name}").value.int_value = number
    span.attributes.add(key="gen_ai.request.id").value.string_value = record.request_id
    for name in ("top_p", "temperature"):
        span.attributes.add(key=f"gen_ai.request.{name}").value.double_value = 1.0
    return span


def realistic(record: Record) -> Record:
    """Build a proxy's record with everything that a real one carries."""
    if not isinstance(record, Exchange):
        return record
    sketch = GapSketch()
    sketch.extend([24_000_000 + 7919 * (n * n % 997) for n in range(40)])
    gaps = Gaps(
        unit="chunk", count=40, sum_ns=sketch.sum_ns, max_ns=sketch.max_ns or 0, max_at_ns=700_000_000, sketch=sketch.encode()
    )
    return replace(
        record,
        model="meta-llama/Llama-3.1-8B-Instruct",
        response_id=f"cmpl-{record.request_id}",
        gaps=gaps if record.stream else None,
        prompt_tokens=120,
        output_tokens=24,
        events=24,
        ttfb_ns=record.ttft_token_ns,
        finish_reasons=("length",),
        forwarded_ns=200_000,
        request_done_ns=250_000,
    )


def fill(folder: Path) -> int:
    """Write a journal of ``REQUESTS`` requests; return the number of spans."""
    log = JournalSettings(folder=folder).open_log()
    spans = 0
    seq = 0
    for first in range(0, REQUESTS, BATCH):
        made = [split_request(f"req-{n}", f"t{n}", at_ms=n) for n in range(first, first + BATCH)]
        for name in ("p", "engine_p", "d", "engine_d", "edge"):
            seq += 1
            records = [realistic(r[name]) for r in made]
            process: Process = replace(records[0].process, sender=f"{name:>4}" * 8)
            request = ExportTraceServiceRequest()
            scoped = request.resource_spans.add(resource=resource_of(process)).scope_spans.add()
            scoped.scope.name = "vllm.tracing.otel" if name.startswith("engine") else SCOPE_PROXY
            scoped.scope.attributes.add(key=BATCH_SEQ).value.int_value = seq
            scoped.spans.extend(
                engine_span(r) if isinstance(r, EngineRequest) else to_span(r)
                for r in records
                if isinstance(r, Exchange | EngineRequest)
            )
            spans += len(records)
            at = 1_700_000_000 * SECOND + (first + BATCH) * 1_000_000 + seq
            log.append(KIND_OF_SIGNAL[Signal.TRACES], request.SerializeToString(), at)
    # advance the journal's clock past every decision wait
    log.append(KIND_OF_SIGNAL[Signal.TRACES], ExportTraceServiceRequest().SerializeToString(), 1_700_001_000 * SECOND)
    log.sync()
    log.close()
    return spans


async def once(root: Path) -> tuple[float, float, int, int, int]:
    """Run the pipeline over the journal once.

    Returns CPU and wall seconds, rows, and the bytes of the spans and requests files.
    """
    publisher = StorePublisher(root / "store")
    recovered = publisher.open()
    journal = Journal(JournalSettings(folder=root / "journal").open_log())
    pipeline = Pipeline(journal, publisher, recovered, now_unix_ns=lambda: 1_700_001_000 * SECOND)
    await journal.start()
    cpu, wall = time.process_time(), time.perf_counter()
    running = asyncio.create_task(pipeline.run())
    while journal.lag_bytes:  # noqa: ASYNC110 - nothing signals that a follower has caught up
        await asyncio.sleep(0.01)
    await journal.shutdown()
    await running
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    publisher.close()
    size = {t: sum(f.stat().st_size for f in (root / "store" / t).rglob("*.parquet")) for t in ("spans", "requests")}
    return cpu, wall, pipeline.stats.rows, size["spans"], size["requests"]


def run() -> list[dict[str, Any]]:
    """Return medians over ``REPEATS`` runs, each over its own journal."""
    results = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            spans = fill(Path(folder) / "journal")
            results.append((spans, *asyncio.run(once(Path(folder)))))
    per_s = [spans / wall for spans, _, wall, *_ in results]
    per_cpu_s = [spans / cpu for spans, cpu, *_ in results]
    assert all(rows == REQUESTS for *_, rows, _, _ in results), results
    value = median(per_s)
    return [
        {
            "name": "pipeline_spans_per_s",
            "value": value,
            "unit": "spans/s",
            "budget": BUDGET_SPANS_PER_S,
            "ratio": value / BUDGET_SPANS_PER_S,
            "met": value >= BUDGET_SPANS_PER_S,
        },
        {
            "name": "pipeline_spans_per_cpu_s",
            "value": median(per_cpu_s),
            "unit": "spans/s of one core",
            "budget": None,
            "ratio": None,
            "met": None,
        },
        {
            "name": "pipeline_spread",
            "value": (max(per_s) - min(per_s)) / value,
            "unit": "of the median",
            "budget": None,
            "ratio": None,
            "met": None,
        },
    ]
