"""The one row that every request keeps: what a stitched and explained request is for the store, the API and the command line."""

from __future__ import annotations

from dataclasses import dataclass

MERGED = "merged"
"""Scope of a row that only withdraws an earlier one: its request turned out to be part of another, which has a row of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of one request.

    ``bound_ns``: how far the value may be off; ``may_be``: for ``unattributed``, the phases it may hide.
    """

    phase: str
    duration_ns: int
    process: str  # prefill | decode | path
    source: str  # e.g. "proxy", "otlp", "proxy-otlp" (a difference of the two), "edge-proxy" (the remainder)
    bound_ns: int
    may_be: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRow:
    """How one piece of evidence came into the request: ``how`` is a value of ``handrail.identity.JoinKind``."""

    evidence: str  # e.g. "prefill:proxy"
    how: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request.

    ``started_unix_ns`` is wall clock of the process that gives the scope; durations are ns; None: not known.
    """

    request_id: str  # 16 hex digits: span id of the evidence that opened it; unique with trace_id
    version: int  # a late span makes a new version of the row; the highest counts; 0: still open, not decided
    scope: str  # edge | decode | engine; MERGED: no request, see there
    trace_id: str
    other_trace_ids: tuple[str, ...]
    client_request_id: str | None
    request_key: str | None
    response_id: str | None
    model: str | None
    operation: str | None
    path: str | None
    stream: bool | None
    started_unix_ns: int
    ttfb_ns: int | None
    ttft_token_ns: int | None
    ttft_text_ns: int | None
    duration_ns: int
    outcome: str
    error_type: str | None
    status: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    edge_instance: str | None
    router_instance: str | None
    prefill_instance: str | None
    decode_instance: str | None
    prefill_host: str | None
    decode_host: str | None
    prefill_attempts: int
    kv_outcome: str | None
    gap_unit: str | None
    gap_count: int | None
    gap_max_ns: int | None
    gap_p50_ns: int | None
    gap_p99_ns: int | None
    gap_sketch: bytes | None
    phase_of: str  # "ttft" | "total": what the phases sum to; "" where nothing could be said
    phases: tuple[PhaseRow, ...]
    joins: tuple[JoinRow, ...]
    findings: tuple[str, ...]
    hints: tuple[str, ...]
    complete: bool  # evidence from every process known to be on the path
    span_ids: tuple[str, ...]
    first_offset: int  # journal offsets of the evidence
    last_offset: int
