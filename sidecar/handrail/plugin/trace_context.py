"""Trace context of a hand-off.

It is the engine's own where it has one, else the trace that every sidecar derives from the request id.
"""

from __future__ import annotations

from typing import Any

from handrail.identity import IdOrigin, derive_trace_id, joinable, new_span_id, new_trace_id, request_key
from handrail.records import SpanIds
from handrail.trace_context import format_traceparent, parse_traceparent


def publish_traceparent(request: Any) -> str:
    """``traceparent`` whose span is the ``kv.publish`` that begins now.

    vLLM keeps the client's headers only where it traces itself (MEASURED section 4b); a derived trace is not sampled.
    """
    headers = request.trace_headers
    given = headers.get("traceparent") if headers else None
    context = parse_traceparent(given.encode()) if isinstance(given, str) else None
    if context is not None:
        ids = SpanIds(trace_id=context.trace_id, span_id=new_span_id(), flags=context.flags)
    else:
        key = request_key(request.request_id, IdOrigin.VLLM_ENGINE).key
        ids = SpanIds(trace_id=derive_trace_id(key) if joinable(key) else new_trace_id(), span_id=new_span_id())
    return format_traceparent(ids).decode()
