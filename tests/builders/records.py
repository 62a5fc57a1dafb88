"""Builders of records for tests; every field has a default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from handrail.identity import new_span_id
from handrail.records import EngineRequest, Exchange, KvParams, Outcome, Process, Record, Role, RouterCall, Source, SpanIds

MS = 1_000_000
EPOCH = 1_700_000_000 * 10**9


def process(role: Role, instance: str | None = None, host: str = "h1") -> Process:
    """Build an observed process; processes of one host share a clock."""
    return Process(role=role, instance=instance or f"{role.value}:8000", host=host, host_name=host)


def ids(trace: str = "t1", parent: Record | str = "", span: str | None = None) -> SpanIds:
    """Build ids from short names; ``parent`` may be the record above."""
    if not isinstance(parent, str):
        return SpanIds(trace_id=parent.ids.trace_id, span_id=span or new_span_id(), parent_span_id=parent.ids.span_id)
    return SpanIds(trace_id=trace.encode().hex().rjust(32, "0"), span_id=span or new_span_id(), parent_span_id=parent)


def exchange(
    role: Role,
    at_ms: float,
    for_ms: float,
    *,
    rid: str | None = "req-a",
    trace: str = "t1",
    parent: Record | str = "",
    host: str = "h1",
    instance: str | None = None,
    ttft_ms: float | None = None,
    **more: Any,
) -> Exchange:
    """Build a streamed exchange that ended well; offsets are in ms after ``EPOCH``."""
    base = Exchange(
        process=process(role, instance, host),
        source=Source.PROXY,
        ids=ids(trace, parent),
        arrival_unix_ns=EPOCH + round(at_ms * MS),
        duration_ns=round(for_ms * MS),
        outcome=Outcome.OK,
        operation="text_completion",
        path="/v1/completions",
        request_id=rid,
        status=200,
        stream=role is not Role.PREFILL,
        ttft_token_ns=None if ttft_ms is None else round(ttft_ms * MS),
    )
    return replace(base, **more)


def engine(
    role: Role,
    at_ms: float,
    for_ms: float,
    *,
    rid: str = "cmpl-req-a-0",
    trace: str = "t1",
    parent: Record | str = "",
    host: str = "h1",
    instance: str | None = None,
    queue_ms: float = 0.0,
    prefill_ms: float = 0.0,
    ttft_ms: float | None = None,
    **more: Any,
) -> EngineRequest:
    """Build vLLM's own span of one request."""
    base = EngineRequest(
        process=process(role, instance, host),
        source=Source.OTLP,
        ids=ids(trace, parent),
        engine="vllm",
        request_id=rid,
        start_unix_ns=EPOCH + round(at_ms * MS),
        end_unix_ns=EPOCH + round((at_ms + for_ms) * MS),
        ttft_ns=round((for_ms if ttft_ms is None else ttft_ms) * MS),
        e2e_ns=round(for_ms * MS),
        queue_ns=round(queue_ms * MS),
        prefill_ns=round(prefill_ms * MS),
        decode_ns=0,
        output_tokens=1,
        outcome=Outcome.OK,
    )
    return replace(base, **more)


def router(at_ms: float, for_ms: float, *, parent: Record | str = "", kind: str = "server", **more: Any) -> RouterCall:
    """Build a router's span."""
    base = RouterCall(
        process=process(Role.ROUTER),
        source=Source.OTLP,
        ids=ids(parent=parent),
        router="vllm-router",
        kind=kind,
        start_unix_ns=EPOCH + round(at_ms * MS),
        end_unix_ns=EPOCH + round((at_ms + for_ms) * MS),
    )
    return replace(base, **more)


def kv(request: str, engine_id: str = "engine-p") -> KvParams:
    """Build the connector keys that P publishes and that D gets for its read."""
    return KvParams(do_remote_prefill=True, do_remote_decode=False, remote_engine_id=engine_id, remote_request_id=request)


def split_request(
    rid: str = "req-a", trace: str = "t1", at_ms: float = 0, host_p: str = "h1", host_d: str = "h1"
) -> dict[str, Record]:
    """Build the records of one streamed P/D request that every process observed.

    Edge 0-1000 ms, P 10-110, D 130-990, first token at 300 ms.
    P: 1 ms to the engine, 20 ms queue, 60 ms compute. D: 2 ms to the engine, 100 ms KV and queue, 15 ms first step.
    """
    edge = exchange(Role.EDGE, at_ms, 1000, rid=rid, trace=trace, ttft_ms=300)
    p = exchange(Role.PREFILL, at_ms + 10, 100, rid=rid, parent=edge, host=host_p, kv_out=kv(f"cmpl-{rid}-0-0000aaaa"))
    d = exchange(
        Role.DECODE, at_ms + 130, 860, rid=rid, parent=edge, host=host_d, ttft_ms=160, kv_in=kv(f"cmpl-{rid}-0-0000aaaa")
    )
    engine_p = engine(
        Role.PREFILL, at_ms + 11, 95, rid=f"cmpl-{rid}-0", parent=p, host=host_p, queue_ms=20, prefill_ms=60, ttft_ms=94
    )
    engine_d = engine(
        Role.DECODE, at_ms + 132, 850, rid=f"cmpl-{rid}-0", parent=d, host=host_d, queue_ms=100, prefill_ms=15, ttft_ms=150
    )
    return {"edge": edge, "p": p, "d": d, "engine_p": engine_p, "engine_d": engine_d}
