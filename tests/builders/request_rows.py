"""Made request rows of common kinds.

The tests of the waterfall, the table and the API client use them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from builders.gaps import NO_GAPS
from handrail_collector.rows import JoinRow, PhaseRow, RequestRow

MS = 10**6
# 2026-11-29 14:19:47.123 UTC
STARTED = 1795961987_123 * MS
P, D, EDGE, ROUTER = "10.0.0.1:8100", "10.0.0.2:8200", "10.0.0.9:8000", "10.0.0.9:8001"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSpan:
    """The parts of a span that the waterfall shows."""

    name: str
    role: str
    instance: str
    start_unix_ns: int
    end_unix_ns: int
    status: int
    span_id: str
    parent_span_id: str


def phase(
    name: str, ms: float, process: str, source: str = "proxy+otlp", bound_ms: float = 0, may_be: tuple[str, ...] = ()
) -> PhaseRow:
    return PhaseRow(
        phase=name, duration_ns=round(ms * MS), process=process, source=source, bound_ns=round(bound_ms * MS), may_be=may_be
    )


JOINS = (
    JoinRow(evidence="edge:proxy", how="opened", span_id="00f067aa0ba902b7"),
    JoinRow(evidence="prefill:proxy", how="ancestor", span_id="11f067aa0ba902b7"),
    JoinRow(evidence="prefill:otlp", how="ancestor", span_id="12f067aa0ba902b7"),
    JoinRow(evidence="decode:proxy", how="connector", span_id="21f067aa0ba902b7"),
    JoinRow(evidence="decode:otlp", how="ancestor", span_id="22f067aa0ba902b7"),
)
KV_AND_QUEUE = ("kv_wait", "kv_handshake", "kv_transfer", "kv_notice", "decode_queue")


def request_row(phases: tuple[PhaseRow, ...], **changes: Any) -> RequestRow:
    """Build a streamed chat request with an edge; its TTFT is the sum of the phases."""
    ttft_ns = sum(each.duration_ns for each in phases) or None
    row = RequestRow(
        request_id="00f067aa0ba902b7",
        version=1,
        scope="edge",
        trace_id=TRACE,
        other_trace_ids=(),
        client_request_id="user-42-7",
        request_key="user-42-7",
        response_id="chatcmpl-user-42-7",
        model="meta-llama/Llama-3.1-8B-Instruct",
        operation="chat",
        path="/v1/chat/completions",
        stream=True,
        started_unix_ns=STARTED,
        ttfb_ns=ttft_ns,
        ttft_token_ns=ttft_ns,
        ttft_text_ns=ttft_ns,
        duration_ns=(ttft_ns or 0) + 3520 * MS,
        outcome="ok",
        error_type=None,
        status=200,
        prompt_tokens=1204,
        output_tokens=312,
        cached_tokens=1024,
        edge_instance=EDGE,
        router_instance=ROUTER,
        prefill_instance=P,
        decode_instance=D,
        prefill_host="host-p",
        decode_host="host-d",
        prefill_attempts=1,
        kv_outcome="ok",
        gap_unit="chunk",
        gap_count=311,
        gap_max_ns=48 * MS,
        gap_p50_ns=11_200_000,
        gap_p99_ns=19_900_000,
        **NO_GAPS,
        phase_of="ttft",
        phases=phases,
        joins=JOINS,
        findings=(),
        hints=(),
        complete=True,
        span_ids=tuple(join.span_id for join in JOINS),
        first_offset=0,
        last_offset=4096,
    )
    return replace(row, **changes)


def spread(
    queue: float = 4.1, compute: float = 61, hops: float = 6.2, hidden: float = 21, first_step: float = 14.2
) -> tuple[PhaseRow, ...]:
    """Return the phases of an ordinary request without the plugin, in ms."""
    return (
        phase("prefill_admission", 1.21, "prefill", bound_ms=0.4),
        phase("prefill_queue", queue, "prefill", "otlp"),
        phase("prefill_compute", compute, "prefill", "otlp"),
        phase("prefill_respond", 0.62, "prefill", bound_ms=0.4),
        phase("router_and_hops", hops, "path", "edge-proxy"),
        phase("decode_admission", 1.05, "decode", bound_ms=0.4),
        phase("first_step", first_step, "decode", "otlp"),
        phase("decode_respond", 0.4, "decode", bound_ms=0.4),
        phase("unattributed", hidden, "decode", "otlp", may_be=KV_AND_QUEUE),
    )


SPANS = tuple(
    MadeSpan(
        name=name,
        role=role,
        instance=instance,
        start_unix_ns=STARTED + round(start * MS),
        end_unix_ns=STARTED + round((start + ms) * MS),
        status=0,
        span_id=span,
        parent_span_id=parent,
    )
    for name, role, instance, start, ms, span, parent in (
        ("handrail.request", "edge", EDGE, 0, 4630, "00f067aa0ba902b7", ""),
        ("prefill", "prefill", P, 2.1, 67, "11f067aa0ba902b7", "00f067aa0ba902b7"),
        ("llm_request", "prefill", P, 2.9, 66, "12f067aa0ba902b7", "11f067aa0ba902b7"),
        ("decode", "decode", D, 70.1, 4555, "21f067aa0ba902b7", "00f067aa0ba902b7"),
        ("llm_request", "decode", D, 70.8, 4553, "22f067aa0ba902b7", "21f067aa0ba902b7"),
    )
)

ROWS = {
    "ordinary": request_row(spread()),
    "slow_prefill_queue": request_row(spread(queue=812), findings=(), ttft_text_ns=940 * MS),
    "slow_router": request_row(spread(hops=420), hints=("client_slow",)),
    "unattributed_at_decode": request_row(spread(hidden=1030), gap_max_ns=412 * MS),
    "stream_error": request_row(
        spread(hidden=5030),
        outcome="stream_error",
        error_type="InternalServerError",
        kv_outcome="failed",
        output_tokens=1,
        gap_count=None,
        gap_max_ns=None,
        gap_p50_ns=None,
        gap_p99_ns=None,
    ),
    "unreachable": request_row(
        (),
        outcome="upstream_unreachable",
        error_type="upstream_unreachable",
        status=502,
        phase_of="",
        duration_ns=3 * MS,
        stream=None,
        prompt_tokens=None,
        output_tokens=None,
        cached_tokens=None,
        prefill_instance=None,
        decode_instance=None,
        router_instance=None,
        response_id=None,
        model=None,
        kv_outcome=None,
        gap_count=None,
        gap_max_ns=None,
        joins=JOINS[:1],
        complete=False,
    ),
    "not_streamed": request_row(
        (
            *spread()[:-1],
            phase("unattributed", 2031, "decode", "proxy", may_be=(*KV_AND_QUEUE, "first_step")),
        ),
        stream=False,
        operation="text_completion",
        phase_of="total",
        ttft_token_ns=None,
        ttft_text_ns=None,
        duration_ns=sum(each.duration_ns for each in spread()[:-1]) + 2031 * MS,
        gap_unit=None,
        gap_count=None,
        gap_max_ns=None,
        gap_p50_ns=None,
        gap_p99_ns=None,
        joins=(JOINS[0], JOINS[1], JOINS[3]),
    ),
    "edgeless": request_row(
        (
            phase("decode_admission", 1.05, "decode", bound_ms=0.4),
            phase("first_step", 14.2, "decode", "otlp"),
            phase("decode_respond", 0.4, "decode", bound_ms=0.4),
            phase("unattributed", 66.3, "decode", "otlp", may_be=KV_AND_QUEUE),
        ),
        scope="decode",
        client_request_id=None,
        response_id="cmpl-___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_02c66623c0fb412cb5ca8b4bab03b73a",
        edge_instance=None,
        router_instance=None,
        findings=(
            "wrong_request: D read KV that P published for another request",
            "context_lost: no trace context reached prefill",
        ),
        hints=("long_request_id",),
        prefill_attempts=2,
        other_trace_ids=("e22c00a2e1b01d538ff29ea6a5e7f268",),
        joins=(
            JoinRow(evidence="decode:proxy", how="opened", span_id="21f067aa0ba902b7"),
            JoinRow(evidence="decode:otlp", how="ancestor", span_id="22f067aa0ba902b7"),
            JoinRow(evidence="prefill:proxy", how="connector", span_id="11f067aa0ba902b7"),
        ),
    ),
}
