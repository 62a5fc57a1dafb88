"""Define the rows that the store, the API and the command line share.

Every stitched and explained request has one row.
"""

from __future__ import annotations

from dataclasses import dataclass

MERGED = "merged"
"""Scope of a row that only withdraws an earlier one.

Its request turned out to be part of another request, which has a row of its own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of one request.

    ``bound_ns``: how far the value may be off. ``may_be``: for ``unattributed``, the phases that it may hide.
    """

    phase: str
    duration_ns: int
    process: str  # prefill | decode | path
    source: str  # e.g. "proxy", "otlp", "proxy-otlp" (a difference of the two), "edge-proxy" (the remainder)
    bound_ns: int
    may_be: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRow:
    """How one piece of evidence was joined to the request.

    ``how`` is a value of ``handrail.identity.JoinKind``.
    """

    evidence: str  # e.g. "prefill:proxy"
    how: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request.

    ``started_unix_ns`` is the wall clock of the process that gives the scope. Durations are ns. None: not known.
    """

    request_id: str  # 16 hex digits: span id of the evidence that opened it; unique with trace_id
    version: int  # a late span makes a new version; the highest counts; 0: open, not decided yet
    scope: str  # edge | decode | engine; MERGED: the row only withdraws
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
    gap_sum_ns: int | None  # this and the next three: of the stream's histogram of gaps
    gap_min_ns: int | None
    gap_buckets: tuple[int, ...]  # indices of the buckets in use, ascending (handrail.metrics.exponential_histogram)
    gap_counts: tuple[int, ...]  # gaps in each of them
    phase_of: str  # "ttft" | "total": what the phases sum to; "" when it is not known
    phases: tuple[PhaseRow, ...]
    joins: tuple[JoinRow, ...]
    findings: tuple[str, ...]
    hints: tuple[str, ...]
    complete: bool  # evidence from every process known to be on the path
    span_ids: tuple[str, ...]
    first_offset: int  # journal offsets of the evidence
    last_offset: int
    kv_reason: str | None = None  # detail of ``kv_outcome``: the engine's failure type, or a word of request/kv_outcome.py
    kv_evidence: tuple[str, ...] = ()  # its sources, strongest first
    kv_bytes: int | None = None  # moved in the hand-off of the answer, as the transport counted
    kv_lost_ns: int | None = None  # time lost to a hand-off that did not go well
    kv_returned_tokens: int | None = None  # tokens of an earlier turn's KV that P fetched back from D instead of computing them
    prefill_paused_ns: int | None = None  # time that P's process was paused before the first token; None: not reported
    decode_paused_ns: int | None = None  # the same of D; this time lies within the phases


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRow:
    """One hand-off of KV.

    The consumer is D and the producer P; the other way round when ``direction`` is ``d_to_p``.
    Durations are by the consumer's clock. None: not known.
    The rows of one request are published together, numbered from 0, under its ids and version. Those of its
    highest version count.
    """

    started_unix_ns: int  # when the load was known, else when the KV was kept
    trace_id: str  # with request_id: the request's row
    request_id: str
    version: int
    number: int  # WITHDRAWN_FETCHES: the request has none any more
    span_id: str  # of the record
    client_request_id: str | None = None
    direction: str | None = None  # p_to_d | d_to_p; None: shared storage
    mode: str | None = None  # pull | push
    connector: str | None = None
    consumer_instance: str | None = None
    producer_instance: str | None = None
    consumer_host: str | None = None
    producer_host: str | None = None
    consumer_engine_id: str | None = None
    producer_engine_id: str | None = None
    consumer_request: str | None = None  # raw request id in that engine's form
    producer_request: str | None = None
    producer_address: str | None = None  # host:port of its side channel, as the consumer knows it
    outcome: str = "unknown"
    reason: str | None = None
    error: str | None = None  # the transport's error name
    evidence: tuple[str, ...] = ()
    tainted: bool = False
    open: bool = False
    duration_ns: int | None = None  # from known to seen by the scheduler, or to its end; the age of an open one
    wait_ns: int | None = None  # from known to posted, or to the beginning of a handshake
    handshake_ns: int | None = None  # from the beginning of the first contact to the post; 0: the peer was known
    posted_ns: int | None = None  # post of the transfer after started_unix_ns, by the clock of the side that moved it
    transfer_ns: int | None = None  # from posted to done
    transfer_bound_ns: int | None = None
    notice_ns: int | None = None
    held_ns: int | None = None  # shortest possible time from kept KV to its read
    clock_bound_ns: int | None = None  # width of the clock bound of the two hosts; None: one clock, or no bound
    lease_ns: int | None = None
    late_ns: int | None = None  # time from the end of the lease to the read
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
    """One stall of a stream, as the outermost witness of the stream saw it.

    Ids, version and number are as in ``FetchRow``.
    ``at``: ``decode`` when D's own stream stalled too or was not observed, else ``path``.
    ``cause``: a value of ``explain.stall_evidence.Cause``. ``lift`` and ``doubt``: see ``stalls/cause.py``.
    """

    started_unix_ns: int  # by the witness's clock
    trace_id: str
    request_id: str
    version: int
    number: int  # NO_STALLS: the request has none any more
    client_request_id: str | None = None
    scope: str = ""
    model: str | None = None
    witness: str = ""  # instance that saw the stall
    at: str = ""
    instance: str | None = None  # of D
    host: str | None = None
    offset_ns: int = 0  # from the start of the request to the stall
    gap_ns: int = 0
    median_ns: int = 0  # median of the gaps around it
    index: int = 0  # index of the gap in the stream
    cause: str = "unknown"
    accounted_ns: int = 0  # part of the gap that the cause accounts for
    lift: float | None = None
    doubt: float | None = None
    evidence: tuple[str, ...] = ()
    first_offset: int = 0
    last_offset: int = 0


WITHDRAWN_FETCHES = -1
NO_STALLS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEventRow:
    """An event of an engine's process.

    ``key``: equal when the same event is reported twice.
    """

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
    """A finding about two processes that belongs to no single request.

    It is repeated each hour while it lasts.
    """

    at_unix_ns: int
    key: str
    offset: int
    kind: str
    detail: str
    instance: str
    peer_instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPairRow:
    """Clock bound of two hosts, once a minute.

    The wall clock of ``peer_host`` minus that of ``host`` lay within [low, high]. None: open on that side.
    """

    at_unix_ns: int
    key: str
    offset: int
    host: str
    peer_host: str
    low_ns: int | None
    high_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRow:
    """Steps of an engine: ``records.Iteration`` as a row."""

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
    median_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFactRow:
    """What an engine's log reports about its transfers within a minute.

    By rank and kind of line (``links/facts.py``).
    """

    at_unix_ns: int
    key: str
    offset: int
    instance: str
    host: str
    recogniser: str
    rank: str
    lane: str  # UCX's name of the lane of remote memory access; '' when the line names none
    nic: str
    reach: str  # intra-node | inter-node | ''
    transfers: int | None = None  # number of transfers in the means
    transfer_ns: int | None = None  # mean
    post_ns: int | None = None
    transfer_bytes: int | None = None
    descriptors: int | None = None
    bootstrapping: int | None = None  # requests that wait for space at the decode
    transferring: int | None = None
    queued: int | None = None
    rate_bytes: int | None = None  # bytes per second of this rank


EventRow = ProcessEventRow | FindingRow | ClockPairRow | IterationRow | LinkFactRow
"""Rows of the append-only tables; each is identified by its key."""
