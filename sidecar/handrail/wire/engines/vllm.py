"""Adapter for vLLM's one span per request, ``llm_request``.

Source: vllm/v1/engine/output_processor.py (do_tracing), seen on 0.32. The span's start is the arrival in the API server's front
end (before tokenisation), its end is when the last token was processed there. ``time_in_queue`` on a decode engine that pulls KV
includes the whole pull. A request that was never scheduled leaves durations of minus the machine's uptime behind (case C15):
such values are dropped, and so is the TTFT of a request that produced no token.
"""

from __future__ import annotations

import math
from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.values import LATEST_UNIX_NS, Attributes, attributes_of, integer, number, text
from handrail.records import EngineRequest, Outcome, Process, Record, Source, SpanIds

SPAN_NAME = "llm_request"
REQUEST_ID = "gen_ai.request.id"
QUEUE, PREFILL = "gen_ai.latency.time_in_queue", "gen_ai.latency.time_in_model_prefill"
NEVER_SCHEDULED: Final = (QUEUE, PREFILL)
"""Attributes that are absurd for a request that was never scheduled.

That is the case after each KV load that failed under policy fail.
"""

SLACK_NS = 1_000_000_000
"""Slack for a part's duration above the whole's.

e2e is wall clock and the parts are monotonic: a part may exceed the whole by a clock step, not by more than this.
"""

_MAX_DURATION_NS = 7 * 24 * 3600 * 10**9


class VllmAdapter:
    """Reader of ``llm_request`` spans."""

    name = "vllm"

    def claims(self, span: Span, scope: str) -> bool:
        """Claim by name alone.

        The scope is a module path that moves between versions (vllm.llm_engine, vllm.tracing.otel).
        """
        return span.name == SPAN_NAME

    def read(self, span: Span, process: Process, attributes: Attributes | None = None) -> Record | None:
        """Read the request; None when the span carries no request id."""
        values = attributes_of(span.attributes) if attributes is None else attributes
        request_id = text(values, REQUEST_ID)
        if request_id is None:
            return None
        start, end, odd = interval(span)
        dropped = list(odd)
        e2e = _seconds(values, "gen_ai.latency.e2e", dropped, _MAX_DURATION_NS)
        whole = e2e if e2e is not None else (end - start if end is not None and start else None)
        limit = _MAX_DURATION_NS if whole is None else whole + SLACK_NS
        queue = _seconds(values, QUEUE, dropped, limit)
        prefill = _seconds(values, PREFILL, dropped, limit)
        decode = _seconds(values, "gen_ai.latency.time_in_model_decode", dropped, limit)
        ttft = _seconds(values, "gen_ai.latency.time_to_first_token", dropped, limit)
        output_tokens = integer(values, "gen_ai.usage.completion_tokens")
        never_scheduled = QUEUE in dropped
        if output_tokens == 0 or never_scheduled:
            # the front end books a TTFT and zero durations for requests that failed before a token (measured): not figures
            queue = prefill = decode = ttft = None
        return EngineRequest(
            process=process,
            source=Source.OTLP,
            ids=span_ids(span),
            engine=self.name,
            request_id=request_id,
            start_unix_ns=start,
            end_unix_ns=end,
            ttft_ns=ttft,
            e2e_ns=e2e,
            queue_ns=queue,
            prefill_ns=prefill,
            decode_ns=decode,
            prompt_tokens=integer(values, "gen_ai.usage.prompt_tokens"),
            output_tokens=output_tokens,
            max_tokens=integer(values, "gen_ai.request.max_tokens"),
            model=text(values, "gen_ai.response.model") or text(values, "gen_ai.request.model"),
            outcome=Outcome.ABORTED if never_scheduled else (Outcome.OK if output_tokens else Outcome.UNKNOWN),
            dropped_attributes=tuple(dropped),
        )


def span_ids(span: Span) -> SpanIds:
    """Ids of any OTLP span as hex."""
    return SpanIds(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        flags=span.flags & 0xFF,
    )


def interval(span: Span) -> tuple[int, int | None, tuple[str, ...]]:
    """Start and end of a span, and the names of unusable values (case C17).

    Unusable are an end before the start and an end centuries away. An end of 0 is a span still open. A start of 0 stays 0: the
    caller must not draw from it.
    """
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    if start > LATEST_UNIX_NS:
        return 0, None, ("startTimeUnixNano",)
    if end == 0:
        return start, None, ()
    if start == 0:
        return 0, end if end <= LATEST_UNIX_NS else None, ("startTimeUnixNano",)
    if end < start or end - start > _MAX_DURATION_NS:
        return start, None, ("endTimeUnixNano",)
    return start, end, ()


def _seconds(values: Attributes, key: str, dropped: list[str], limit_ns: int) -> int | None:
    value = number(values, key)
    if value is None:
        return None
    if not math.isfinite(value) or value < 0 or value * 1e9 > limit_ns:
        dropped.append(key)
        return None
    return round(value * 1e9)
