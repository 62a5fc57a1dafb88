"""Choose the span ids of a record.

They belong to the engine's trace context if it had one, else to the trace that every sidecar derives from the request id.
"""

from __future__ import annotations

from handrail.identity import IdOrigin, derive_trace_id, joinable, new_span_id, new_trace_id, request_key
from handrail.records import SpanIds
from handrail.trace_context import Origin, TraceContext, parse_traceparent


def read_context(traceparent: str | None) -> TraceContext | None:
    """Read a trace context; None for anything that is not a strict ``traceparent``."""
    return parse_traceparent(traceparent.encode("utf-8", "replace")) if traceparent else None


def ids_of(request_id: str, context: TraceContext | None) -> tuple[SpanIds, str]:
    """Ids of a new span below ``context``, and where the trace id came from."""
    if context is not None:
        ids = SpanIds(trace_id=context.trace_id, span_id=new_span_id(), parent_span_id=context.span_id, flags=context.flags)
        return ids, Origin.INBOUND.value
    key = request_key(request_id, IdOrigin.VLLM_ENGINE).key
    if joinable(key):
        return SpanIds(trace_id=derive_trace_id(key), span_id=new_span_id()), Origin.DERIVED.value
    return SpanIds(trace_id=new_trace_id(), span_id=new_span_id()), Origin.RANDOM.value
