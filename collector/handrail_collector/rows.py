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
    kv_reason: str | None = None  # a word beside ``kv_outcome``: the engine's failure type, or one of request/kv_outcome.py
    kv_evidence: tuple[str, ...] = ()  # who said so, strongest first
    kv_bytes: int | None = None  # moved for the answer's hand-off, as the transport counted
    kv_lost_ns: int | None = None  # what a hand-off that did not go well cost
    kv_returned_tokens: int | None = None  # of an earlier turn's KV, that P took back from D instead of computing them
    prefill_paused_ns: int | None = None  # before the first token: so long P's process stood still; None: nobody told of it
    decode_paused_ns: int | None = None  # and D's; the time lies in the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRow:
    """One hand-off of KV. *reader*: the engine that loads it; *keeper*: the one that kept it; D and P, unless ``direction`` is
    ``d_to_p``. Durations by the reader's clock; None: not known.

    The rows of one request are told together, numbered from 0, under its ids and version; those of its highest version count.
    """

    started_unix_ns: int  # the load was known, else the KV was kept
    trace_id: str  # with request_id: the request's row
    request_id: str
    version: int
    number: int  # WITHDRAWN_FETCHES: none any more
    span_id: str  # of the record
    client_request_id: str | None = None
    direction: str | None = None  # p_to_d | d_to_p; None: shared storage
    mode: str | None = None  # pull | push
    connector: str | None = None
    reader_instance: str | None = None
    keeper_instance: str | None = None
    reader_host: str | None = None
    keeper_host: str | None = None
    reader_engine_id: str | None = None
    keeper_engine_id: str | None = None
    reader_request: str | None = None  # raw, in that engine's form
    keeper_request: str | None = None
    keeper_address: str | None = None  # host:port of its side channel, as the reader was told
    outcome: str = "unknown"
    reason: str | None = None
    error: str | None = None  # the transport's error name
    evidence: tuple[str, ...] = ()
    tainted: bool = False
    open: bool = False
    duration_ns: int | None = None  # known to seen by the scheduler, or to its end; of an open one its age
    wait_ns: int | None = None  # known to posted, or to the beginning of a first contact
    handshake_ns: int | None = None  # first contact, until it was posted; 0: the peer was known
    posted_ns: int | None = None  # of the transfer, from started_unix_ns on, by the clock of the side that moved it
    transfer_ns: int | None = None  # posted to done
    transfer_bound_ns: int | None = None
    notice_ns: int | None = None
    held_ns: int | None = None  # at least so long KV lay before its read began
    clock_bound_ns: int | None = None  # so wide is what the two hosts' clocks may differ by; None: one clock, or no bound
    lease_ns: int | None = None
    late_ns: int | None = None  # read so long after the lease had ended
    lost_ns: int | None = None
    tokens: int | None = None
    tokens_local: int | None = None
    blocks: int | None = None
    block_bytes: int | None = None
    bytes_expected: int | None = None
    bytes_moved: int | None = None
    descriptors: int | None = None
    ranks: int | None = None
    first_offset: int = 0
    last_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRow:
    """One stall of a stream, as the outermost witness of the stream saw it. Ids, version and number: as of a ``FetchRow``.

    ``at``: ``decode``, where D's own stream stood still too, or nobody watched it there; else ``path``. ``cause``: a value of
    ``explain.stall_evidence.Cause``. ``lift`` and ``doubt``: see ``stalls/cause.py``.
    """

    started_unix_ns: int  # by the witness's clock
    trace_id: str
    request_id: str
    version: int
    number: int  # NO_STALLS: none any more
    client_request_id: str | None = None
    scope: str = ""
    model: str | None = None
    witness: str = ""  # instance
    at: str = ""
    instance: str | None = None  # of D
    host: str | None = None
    offset_ns: int = 0  # from the request's start to the stall's
    gap_ns: int = 0
    median_ns: int = 0  # of the gaps around it
    index: int = 0  # which gap of the stream
    cause: str = "unknown"
    accounted_ns: int = 0  # of the gap, by that cause
    lift: float | None = None
    doubt: float | None = None
    evidence: tuple[str, ...] = ()
    first_offset: int = 0
    last_offset: int = 0


WITHDRAWN_FETCHES = -1
NO_STALLS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEventRow:
    """What happened to a process of an engine. ``key``: equal for the same event told twice."""

    at_unix_ns: int
    key: str
    offset: int
    kind: str
    role: str
    instance: str
    host: str
    source: str
    engine: str
    engine_id: str | None
    pid: int | None
    process_kind: str | None
    detail: str
    at_bound_ns: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """Something wrong between two processes, of no single request. Said again each hour while it lasts."""

    at_unix_ns: int
    key: str
    offset: int
    kind: str
    detail: str
    instance: str
    peer_instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPairRow:
    """Wall clock of ``peer_host`` minus that of ``host`` lay within [low, high]; None: open on that side. Once a minute."""

    at_unix_ns: int
    key: str
    offset: int
    host: str
    peer_host: str
    low_ns: int | None
    high_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRow:
    """What an engine ran: ``records.Iteration`` as a row."""

    at_unix_ns: int
    key: str
    offset: int
    role: str
    instance: str
    host: str
    engine_id: str | None
    core: int | None
    duration_ns: int
    steps: int
    full: bool
    busy_ns: int
    longest_ns: int
    longest_at_ns: int
    requests: int
    prefill_requests: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    running: int | None
    waiting: int | None
    kv_landing_steps: int
    resumed_tokens: int = 0
    usual_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFactRow:
    """What an engine's log said of its transfers within a minute, by rank and kind of line (``links/facts.py``)."""

    at_unix_ns: int
    key: str
    offset: int
    instance: str
    host: str
    recogniser: str
    rank: str
    lane: str  # UCX's name of the lane of remote memory access; '': the line names none
    nic: str
    reach: str  # intra-node | inter-node | ''
    transfers: int | None = None  # that the means are of
    transfer_ns: int | None = None  # mean
    post_ns: int | None = None
    transfer_bytes: int | None = None
    descriptors: int | None = None
    bootstrapping: int | None = None  # requests that wait for space at the decode
    transferring: int | None = None
    queued: int | None = None
    rate_bytes: int | None = None  # a second, of this rank


EventRow = ProcessEventRow | FindingRow | ClockPairRow | IterationRow | LinkFactRow
"""Rows of the tables that only grow; each is known by its key."""
