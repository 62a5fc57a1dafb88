"""Rows like those of a real deployment, for tests of size and speed.

Ids are random, times jitter, attributes are vLLM's.
Shapes and resolutions follow the recorded OTLP of vLLM 0.32 (tests/data/recordings/otlp_raw): wall-clock figures are multiples of
2**-22 s, monotonic ones of 2**-38 s (a machine up for some hours), because they are differences of float seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from builders.gaps import gap_fields
from handrail import conventions as names
from handrail.metrics.exponential_histogram import GapSketch
from handrail.otlp.values import AttributeValue
from handrail_collector.rows import JoinRow, PhaseRow, RequestRow
from handrail_collector.store.tables.spans import SpanRow

START_UNIX_NS = 1_796_000_000_000_000_000
WALL, MONOTONIC = 2.0**22, 2.0**38


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances by role and the mean time between two requests."""

    prefill: int = 4
    decode: int = 8
    interval_ns: int = 20_000_000


def spans_of_requests(count: int, fleet: Fleet | None = None, seed: int = 1, proxies: bool = False) -> list[SpanRow]:
    """Yield two vLLM spans per request, of P and of D.

    ``proxies``: the edge's own span as well.
    """
    fleet = fleet or Fleet()
    rng = random.Random(seed)
    resources: dict[str, dict[str, AttributeValue]] = {}
    rows: list[SpanRow] = []
    at = START_UNIX_NS
    for number in range(count):
        at += int(rng.expovariate(1 / fleet.interval_ns))
        trace_id, edge_id = rng.randbytes(16).hex(), rng.randbytes(8).hex()
        stem = rng.randbytes(16).hex()
        prompt, output = int(rng.lognormvariate(6.5, 1)) + 8, int(rng.lognormvariate(5, 0.8)) + 1
        queue, compute = rng.expovariate(1 / 0.004), rng.lognormvariate(-3, 0.6)
        kv, decode = rng.lognormvariate(-3.2, 0.5), output * rng.lognormvariate(-4, 0.1)
        start = at
        for role in ("prefill", "decode"):
            instance = f"10.0.{len(role)}.{rng.randrange(fleet.prefill if role == 'prefill' else fleet.decode)}:8100"
            resource = resources.setdefault(role + instance, _resource(role, instance, rng))
            start += int(rng.uniform(400_000, 2_500_000))
            waited = queue if role == "prefill" else kv + queue
            first = compute if role == "prefill" else rng.lognormvariate(-4, 0.2)
            rest = 0.0 if role == "prefill" else decode
            attributes = _vllm_attributes(waited, first, rest, prompt, 1 if role == "prefill" else output, f"cmpl-{stem}-0")
            length = int((waited + first + rest) * 1e9 + rng.uniform(300_000, 900_000))
            rows.append(
                _span(number, trace_id, rng.randbytes(8).hex(), edge_id, start, length, role, instance, resource, attributes)
            )
            start += length if role == "prefill" else 0
        if proxies:
            resource = resources.setdefault("edge", _resource("edge", "10.0.0.1:8080", rng))
            rows.append(_edge_span(number, trace_id, edge_id, at, start + length - at, resource, stem, prompt, output, rng))
    return rows


def _vllm_attributes(
    queue_s: float, prefill_s: float, decode_s: float, prompt: int, output: int, request_id: str
) -> dict[str, AttributeValue]:
    queue, prefill, decode = (int(value * MONOTONIC) / MONOTONIC for value in (queue_s, prefill_s, decode_s))
    ttft = int((queue_s + prefill_s + 0.0004) * WALL) / WALL
    return {
        "gen_ai.latency.time_to_first_token": ttft,
        "gen_ai.latency.e2e": int((queue_s + prefill_s + decode_s + 0.0004) * WALL) / WALL,
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": prefill + decode,
        "gen_ai.request.id": request_id,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 1 if output == 1 else 512,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.n": 1,
    }


def _resource(role: str, instance: str, rng: random.Random) -> dict[str, AttributeValue]:
    return {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "service.instance.id": rng.randbytes(16).hex(),
        "service.name": f"vllm-{role}",
        "vllm.process_id": str(rng.randrange(1, 60_000)),
        names.ROLE: role,
        names.INSTANCE: instance,
        names.SENDER_ID: rng.randbytes(16).hex(),
        names.HOST_ID: rng.randbytes(16).hex(),
        names.HOST_NAME: instance.split(":")[0],
    }


def _span(
    number: int,
    trace_id: str,
    span_id: str,
    parent: str,
    start: int,
    length: int,
    role: str,
    instance: str,
    resource: dict[str, AttributeValue],
    attributes: dict[str, AttributeValue],
    name: str = "llm_request",
) -> SpanRow:
    return SpanRow(
        offset=number,
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent,
        name=name,
        kind=2,
        start_unix_ns=start,
        end_unix_ns=start + length,
        status=0,
        status_message="",
        flags=768,
        trace_state="",
        role=role,
        instance=instance,
        service=str(resource["service.name"]),
        scope="vllm.tracing.otel" if name == "llm_request" else names.SCOPE_PROXY,
        resource=resource,
        attributes=attributes,
        events=(),
        links=(),
        raw_bytes=522 + number % 7,
    )


def _edge_span(
    number: int,
    trace_id: str,
    span_id: str,
    at: int,
    length: int,
    resource: dict[str, AttributeValue],
    stem: str,
    prompt: int,
    output: int,
    rng: random.Random,
) -> SpanRow:
    ttft = int(length * rng.uniform(0.05, 0.4))
    forwarded = rng.randrange(80_000, 300_000)
    attributes: dict[str, AttributeValue] = {
        names.HTTP_METHOD: "POST",
        names.URL_PATH: "/v1/completions",
        names.HTTP_STATUS: 200,
        names.GEN_AI_OPERATION: "text_completion",
        names.GEN_AI_MODEL: "tiny",
        names.GEN_AI_RESPONSE_ID: f"cmpl-{stem}",
        names.GEN_AI_FINISH_REASONS: ("length",),
        names.GEN_AI_INPUT_TOKENS: prompt,
        names.GEN_AI_OUTPUT_TOKENS: output,
        names.SOURCE: "proxy",
        names.OUTCOME: "ok",
        names.REQUEST_ID: stem,
        names.REQUEST_ID_ADDED: False,
        names.REQUEST_KEY: stem,
        names.JOIN_KEY: stem,
        names.STREAM: True,
        names.TRACE_ORIGIN: "inbound",
        names.TIME_FORWARDED_NS: forwarded,
        names.TIME_REQUEST_DONE_NS: forwarded + rng.randrange(10_000, 40_000),
        names.TIME_FIRST_BYTE_NS: ttft - rng.randrange(5_000, 20_000),
        names.TIME_FIRST_TOKEN_NS: ttft,
        names.TIME_FIRST_TEXT_NS: ttft,
        names.TIME_LAST_CONTENT_NS: length - rng.randrange(100_000, 300_000),
        names.TIME_DURATION_NS: length,
        names.WRITE_BLOCKED_NS: 0,
        names.EVENTS: output,
        names.GAP_UNIT: "chunk",
        names.GAP_COUNT: max(output - 1, 0),
        names.GAP_SUM_NS: length - ttft,
        names.GAP_MAX_NS: int((length - ttft) / output * rng.uniform(1.2, 4)),
        names.GAP_MAX_AT_NS: rng.randrange(ttft, length),
        names.GAP_SKETCH: stream_gaps(output, rng).encode(),
    }
    return _span(number, trace_id, span_id, "", at, length, "edge", "10.0.0.1:8080", resource, attributes, names.SPAN_REQUEST)


def stream_gaps(output_tokens: int, rng: random.Random) -> GapSketch:
    """Build the gaps of a stream with ``output_tokens`` chunks."""
    gap = rng.lognormvariate(16.5, 0.2)
    gaps = GapSketch()
    gaps.extend([int(gap * rng.lognormvariate(0, 0.35)) for _ in range(output_tokens - 1)])
    return gaps


def request_rows(count: int, fleet: Fleet | None = None, seed: int = 2) -> list[RequestRow]:
    """Build rows of streamed requests through edge, router, P and D.

    They are as the collector makes them with proxies and OTLP taps.
    """
    fleet = fleet or Fleet()
    rng = random.Random(seed)
    rows: list[RequestRow] = []
    at = START_UNIX_NS
    for number in range(count):
        at += int(rng.expovariate(1 / fleet.interval_ns))
        rows.append(_request_row(number, at, fleet, rng))
    return rows


def _request_row(number: int, at: int, fleet: Fleet, rng: random.Random) -> RequestRow:
    key = rng.randbytes(16).hex()
    ids = tuple(rng.randbytes(8).hex() for _ in range(5))
    evidence = ("edge:proxy", "prefill:proxy", "decode:proxy", "prefill:otlp", "decode:otlp")
    hows = ("opened", "connector", "connector", "ancestor", "ancestor")
    phases = tuple(
        PhaseRow(phase=phase, duration_ns=int(rng.lognormvariate(mean, 0.6)), process=process, source=source, bound_ns=bound)
        for phase, mean, process, source, bound in (
            ("prefill_admission", 13.0, "prefill", "proxy-otlp", rng.randrange(1, 500_000)),
            ("prefill_queue", 15.0, "prefill", "otlp", 0),
            ("prefill_compute", 17.5, "prefill", "otlp", 0),
            ("prefill_respond", 13.5, "prefill", "proxy-otlp", rng.randrange(1, 500_000)),
            ("router_and_hops", 14.5, "path", "edge-proxy", 0),
            ("decode_admission", 13.0, "decode", "proxy-otlp", rng.randrange(1, 500_000)),
            ("first_step", 16.5, "decode", "otlp", 0),
            ("decode_respond", 12.5, "decode", "proxy-otlp", rng.randrange(1, 500_000)),
        )
    )
    waited = PhaseRow(
        phase="unattributed",
        duration_ns=int(rng.lognormvariate(17.0, 0.6)),
        process="decode",
        source="otlp",
        bound_ns=0,
        may_be=("kv_wait", "kv_handshake", "kv_transfer", "kv_notice", "decode_queue"),
    )
    phases = (*phases[:6], waited, *phases[6:])
    ttft = sum(phase.duration_ns for phase in phases)
    output = int(rng.lognormvariate(5, 0.8)) + 1
    gap, gaps = int(rng.lognormvariate(16.5, 0.2)), stream_gaps(output, rng)
    return RequestRow(
        request_id=ids[0],
        version=1 + (rng.random() < 0.01),
        scope="edge",
        trace_id=rng.randbytes(16).hex(),
        other_trace_ids=(),
        client_request_id=key,
        request_key=key,
        response_id=f"cmpl-{key}",
        model="tiny",
        operation="text_completion",
        path="/v1/completions",
        stream=True,
        started_unix_ns=at,
        ttfb_ns=ttft - rng.randrange(5_000, 20_000),
        ttft_token_ns=ttft,
        ttft_text_ns=ttft if rng.random() < 0.9 else ttft + gap,
        duration_ns=ttft + output * gap,
        outcome="ok" if rng.random() < 0.98 else "stream_error",
        error_type=None,
        status=200,
        prompt_tokens=int(rng.lognormvariate(6.5, 1)) + 8,
        output_tokens=output,
        cached_tokens=None,
        edge_instance="10.0.0.1:8080",
        router_instance=None,
        prefill_instance=f"10.0.7.{rng.randrange(fleet.prefill)}:8100",
        decode_instance=f"10.0.6.{rng.randrange(fleet.decode)}:8100",
        prefill_host="a" * 32,
        decode_host="b" * 32,
        prefill_attempts=1,
        kv_outcome="ok",
        gap_unit="chunk",
        gap_count=output - 1,
        gap_max_ns=gaps.max_ns,
        gap_p50_ns=int(1.02 ** round(rng.gauss(832, 4))),
        gap_p99_ns=int(1.02 ** round(rng.gauss(870, 8))),
        **gap_fields(gaps),
        phase_of="ttft",
        phases=phases,
        joins=tuple(JoinRow(evidence=e, how=h, span_id=i) for e, h, i in zip(evidence, hows, ids, strict=True)),
        findings=("clock_bound_wide",) if rng.random() < 0.02 else (),
        hints=(),
        complete=True,
        span_ids=ids,
        first_offset=number * 5 + rng.randrange(5),
        last_offset=number * 5 + rng.randrange(100, 140),
    )


def moved(table: pa.Table, by_ns: int, seed: int) -> pa.Table:
    """Return the same requests ``by_ns`` later with new ids: many rows at little cost.

    Client ids become 24 random hex digits.
    """
    rng = random.Random(seed)
    rows = table.num_rows

    def ids(size: int) -> pa.Array:
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(rng.randbytes(rows * size))])

    changed = {
        "started_unix_ns": pc.add(table["started_unix_ns"], by_ns),
        "trace_id": ids(16),
        "request_id": ids(8),
        "client_request_id": pa.array([rng.randbytes(12).hex() for _ in range(rows)]),
    }
    for name, values in changed.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table
