"""What the sources say, as plain facts. Nothing downstream knows where a record came from except by its ``source`` field.

All ids are lower-case hex strings; ``*_unix_ns`` is wall clock; every other ``*_ns`` is a duration or an offset from the record's
own arrival on the observing process's monotonic clock. ``None`` always means "not seen here", never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from handrail.stalls import Stalls


class Role(str, Enum):
    """Which process of the serving stack was observed."""

    EDGE = "edge"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLLOCATED = "collocated"
    UNKNOWN = "unknown"


class Source(str, Enum):
    """Which source a fact came from."""

    PROXY = "proxy"
    PLUGIN = "plugin"
    MIDDLEWARE = "middleware"
    OTLP = "otlp"
    METRICS = "metrics"
    LOG = "log"
    NVML = "nvml"
    DCGM = "dcgm"
    RDMA = "rdma"
    NIC = "nic"


class Outcome(str, Enum):
    """How one exchange ended at the process that observed it."""

    OK = "ok"
    HTTP_ERROR = "http_error"  # status 400 or above
    STREAM_ERROR = "stream_error"  # an error event inside HTTP 200, or response.failed
    INCOMPLETE = "incomplete"  # the server says so itself: response.incomplete
    TRUNCATED = "truncated"  # a clean end with neither finish_reason nor [DONE]
    UNKNOWN_FINISH = "unknown_finish"  # [DONE] without a finish_reason
    CLIENT_DISCONNECT = "client_disconnect"
    UPSTREAM_DISCONNECT = "upstream_disconnect"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"  # the engine says the request was aborted
    TAINTED = "tainted"  # of a joined request: it ended well, on KV that could not be trusted (docs/outcomes.md)
    UNKNOWN = "unknown"


class Hint(str, Enum):
    """Oddities of a stream worth telling; they never change a figure."""

    FAKE_STREAM = "fake_stream"  # everything arrived in one burst at the end
    BUFFERED = "buffered"  # a compression layer or a parser holds text back
    CLOSE_MISSING = "stream_close_missing"  # finish_reason, then neither [DONE] nor a close
    CLIENT_SLOW = "client_slow"
    UNDECODABLE = "undecodable"  # unknown content encoding or malformed events: times not read
    DUPLICATE_REQUEST_ID = "duplicate_request_id"
    DUPLICATE_TRACEPARENT = "duplicate_traceparent"
    INVALID_TRACEPARENT = "invalid_traceparent"
    CONTEXT_CONFLICT = "context_conflict"  # traceparent and b3 disagree; traceparent won
    LONG_REQUEST_ID = "long_request_id"
    RETRIED = "retried"
    REASONING_ONLY = "reasoning_only"  # it ended of itself, and had reasoning but no answer after it
    CACHE_PROBE = "cache_probe"  # a decode was asked first whether its cache holds enough, and it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class KvParams:
    """``kv_transfer_params`` (vLLM) or its like; the connector keys that join P to D. MEASURED section 4c."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_blocks: int | None = None  # blocks over all KV-cache groups
    remote_num_tokens: int | None = None
    transfer_mode: str | None = None  # pull | push
    transfer_id: str | None = None  # Mooncake
    bootstrap_room: str | None = None  # SGLang

    def keys(self) -> tuple[str, ...]:
        """Connector keys, strongest first, each prefixed by its kind so that kinds never collide."""
        found = []
        if self.remote_engine_id and self.remote_request_id:
            found.append(f"vllm:{self.remote_engine_id}:{self.remote_request_id}")
        if self.transfer_id:
            found.append(f"mooncake:{self.transfer_id}")
        if self.bootstrap_room:
            found.append(f"sglang:{self.bootstrap_room}")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanIds:
    """Where a record stands in its trace. ``parent_span_id`` is '' for a root; ``flags`` are the W3C trace flags."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The observed process and its host, from the resource."""

    role: Role
    instance: str  # host:port of the engine or router; '' when unknown
    host: str  # host.id, else host.name, else ''; equal strings share one wall clock
    service: str = ""
    sender: str = ""  # handrail.sender.id of the sidecar that told us
    host_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps between chunks with content, per choice index, of one stream; unit says whether a gap was divided by its tokens."""

    unit: str  # "chunk": stream gaps; "token": per-token ITL, weighted by tokens
    count: int
    sum_ns: int
    max_ns: int
    max_at_ns: int  # offset from arrival of the end of the largest gap
    sketch: bytes  # sketch.GapSketch.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One HTTP request as a proxy or middleware beside one process saw it."""

    process: Process
    source: Source
    ids: SpanIds
    arrival_unix_ns: int
    duration_ns: int  # arrival to the end of the response (or to the abort)
    outcome: Outcome
    method: str = "POST"
    path: str = ""
    operation: str | None = None  # chat | text_completion | responses | messages; None for anything else
    trace_origin: str = "derived"
    client_parent: str = ""
    request_id: str | None = None
    request_id_hash: str | None = None
    request_id_added: bool = False
    response_id: str | None = None
    model: str | None = None
    choices: int | None = None  # n x prompts, as asked
    stream: bool | None = None  # from the response's content type
    stream_asked: bool | None = None
    inspected: str = "whole"
    status: int | None = None
    error_type: str | None = None
    error_code: str | None = None
    forwarded_ns: int | None = None  # head sent upstream
    request_done_ns: int | None = None  # last body byte sent upstream
    ttfb_ns: int | None = None  # first byte of the response's body
    ttft_token_ns: int | None = None
    ttft_text_ns: int | None = None
    ttft_text_kind: str | None = None
    last_content_ns: int | None = None
    finish_ns: int | None = None  # the event that carried finish_reason
    first_delivered_ns: int | None = None  # first content byte handed to the client's socket
    write_blocked_ns: int = 0
    content_encoding: str | None = None
    events: int = 0
    gaps: Gaps | None = None
    itl: Gaps | None = None
    stalls: Stalls | None = None
    tpot_mean_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    kv_in: KvParams | None = None
    kv_out: KvParams | None = None
    hints: tuple[Hint, ...] = ()
    resend_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine itself reported it (vLLM: the ``llm_request`` span). Durations are the engine's own."""

    process: Process
    source: Source
    ids: SpanIds
    engine: str  # vllm | sglang | ...
    request_id: str  # raw, in the engine's form
    start_unix_ns: int  # arrival in the engine's front end
    end_unix_ns: int | None  # None: open or unusable
    ttft_ns: int | None = None  # arrival to the first token as the front end saw it
    e2e_ns: int | None = None
    queue_ns: int | None = None  # vLLM on D: includes the whole KV wait
    prefill_ns: int | None = None  # scheduled to first token
    decode_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    model: str | None = None
    outcome: Outcome = Outcome.UNKNOWN
    dropped_attributes: tuple[str, ...] = ()  # names whose values were absurd


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCall:
    """One span of a router: its SERVER span, or a CLIENT span of a call to P or D."""

    process: Process
    source: Source
    ids: SpanIds
    router: str  # vllm-router | ...
    kind: str  # server | client
    start_unix_ns: int
    end_unix_ns: int | None  # None where the router's end cannot be trusted
    phase: Role | None = None  # prefill or decode for a client span
    request_id: str | None = None
    peer: str | None = None  # host:port called
    path: str | None = None
    status: int | None = None


class Direction(str, Enum):
    """Which way KV went: D reads what P prefilled, or P reads what D still holds of an earlier turn."""

    P_TO_D = "p_to_d"
    D_TO_P = "d_to_p"


class FetchEffect(str, Enum):
    """What the engine's load failure policy did to the request whose load failed."""

    FAILED = "failed"
    RECOMPUTED = "recomputed"


ENGINE_LOST: Final = "engine_lost"
ENGINE_STOPPED: Final = "engine_stopped"
ENGINE_GONE: Final = frozenset({ENGINE_LOST, ENGINE_STOPPED})
"""How what was open in an engine ended with it: the engine died, or was told to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """One request inside one engine, from the plugin: EngineCore's monotonic clock, offsets from ``queued_unix_ns``.

    ``provisional``: not finished yet; ``seen_ns`` is then how old it was. Later records of the same ids replace earlier ones.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str  # vllm | ...
    request_id: str  # raw, in the engine's form
    queued_unix_ns: int
    engine_id: str | None = None  # the KV connector's id of this engine
    trace_origin: str = "derived"  # inbound: the engine knew the request's traceparent; derived: from the request key
    arrival_unix_ns: int | None = None  # arrival in the front end, on the wall clock
    scheduled_ns: int | None = None  # first scheduled
    first_token_ns: int | None = None
    finished_ns: int | None = None
    seen_ns: int | None = None
    preemptions: int = 0
    preempted_ns: int = 0  # preempted until scheduled again, summed
    preempted_before_first_ns: int = 0  # the part of it before the first token
    preempted: tuple[int, ...] = ()  # from, to, from, to ...: the longest 16, by time
    # the engine's word: stopped | length_capped | aborted | ignored | error | repetition; ours: ENGINE_GONE, lost (not heard)
    status: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # from the engine's own prefix cache
    external_tokens: int | None = None  # through the connector
    output_tokens: int | None = None
    provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """One hand-off as the engine that receives the KV saw it, ranks merged; one record a load.

    Offsets from ``known_unix_ns`` (the scheduler decided to load) on the host's monotonic clock, which all processes of an engine
    share. ``X_bound_ns``: X happened at most this much before the offset given (a poll saw it). ``provisional``: still open at
    ``seen_ns``.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str
    request_id: str  # raw, of the engine that receives
    known_unix_ns: int
    connector: str | None = None  # class name
    engine_id: str | None = None
    peer_engine_id: str | None = None  # with peer_request_id: the connector key
    peer_request_id: str | None = None
    peer_host: str | None = None
    peer_port: int | None = None
    direction: Direction | None = None  # None: shared storage, no peer
    mode: str | None = None  # pull | push; None: the connector does not say
    trace_origin: str = "derived"
    publish_span_id: str = ""  # of the peer's kv.publish, where the hand-off carried it; then also the parent
    decode_span_id: str = ""  # what the engine's own trace context named, where it knew one
    load_started_ns: int | None = None  # first rank
    load_started_bound_ns: int = 0
    handshake_begin_ns: int | None = None  # None: the peer was known
    handshake_end_ns: int | None = None
    handshake_bound_ns: int = 0
    posted_ns: int | None = None  # first transfer handed to the transport; pushed: registration sent to P
    posted_bound_ns: int = 0
    done_ns: int | None = None  # last rank's last transfer
    done_bound_ns: int = 0
    noticed_ns: int | None = None  # the scheduler knows
    noticed_bound_ns: int = 0
    ended_ns: int | None = None  # noticed, or the request ended before
    seen_ns: int | None = None
    tokens_wanted: int | None = None  # to be loaded
    tokens_local: int | None = None  # already here
    blocks: int | None = None  # to be written, all KV-cache groups
    block_bytes: int | None = None  # of one block, all layers, all ranks; None where groups differ
    bytes_expected: int | None = None  # blocks x block bytes, groups and ranks apart
    bytes_moved: int | None = None  # as the transport counted; None: it does not say
    descriptors: int | None = None
    ranks: int | None = None  # that reported a start
    ranks_done: int | None = None
    failure: str | None = None  # the engine's failure type: transfer_setup_failed, handshake_failed, ...
    failure_error: str | None = None  # the transport's error name, never its text
    policy: str | None = None  # fail | recompute
    effect: FetchEffect | None = None
    request_status: str | None = None  # where the request ended while the fetch was open
    provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPublish:
    """KV kept for a peer, from the request's end until it is read, freed or expired. Offsets from ``published_unix_ns``.

    A read after expiry (``late_read_ns``) comes as a later record of the same ids.
    """

    process: Process
    source: Source
    ids: SpanIds
    engine: str
    request_id: str  # raw: what the peer will name as remote_request_id
    published_unix_ns: int
    connector: str | None = None
    engine_id: str | None = None
    direction: Direction | None = None
    mode: str | None = None
    trace_origin: str = "derived"
    tokens: int | None = None
    blocks: int | None = None
    block_bytes: int | None = None
    kv_bytes: int | None = None
    lease_ns: int | None = None  # as promised at publication
    lease_end_ns: int | None = None  # after the heartbeats seen
    heartbeats: int = 0
    posted_ns: int | None = None  # pushed only: P's own writes
    done_ns: int | None = None
    done_bound_ns: int = 0
    bytes_moved: int | None = None
    descriptors: int | None = None
    read_ns: int | None = None  # the last reader's notification was seen
    read_bound_ns: int = 0
    readers: int = 0
    reader: str | None = None  # the transport's name of the (last) reader; see EngineFacts.agents
    freed_ns: int | None = None  # the scheduler had the blocks back
    expired_ns: int | None = None
    late_read_ns: int | None = None
    failure: str | None = None
    failure_error: str | None = None
    seen_ns: int | None = None
    provisional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What the engine ran: one step (``steps`` 1, ``full``), or a rollup of the steps that ended within about a second."""

    process: Process
    source: Source
    started_unix_ns: int  # of the (first) step
    duration_ns: int  # first step's start to last step's end
    steps: int
    full: bool = False
    engine_id: str | None = None
    core: int | None = None  # pid of the EngineCore (several under data parallelism)
    busy_ns: int = 0  # sum of the steps' times
    longest_ns: int = 0
    longest_at_ns: int = 0  # end of the longest step, from started_unix_ns
    requests: int = 0  # most in one step
    prefill_requests: int = 0  # request-steps that computed prompt tokens
    prefill_tokens: int = 0
    decode_tokens: int = 0  # scheduled, drafts included
    preemptions: int = 0
    running: int | None = None  # at the end
    waiting: int | None = None
    kv_landing_steps: int = 0  # steps in which a KV load ended
    resumed_tokens: int = 0  # computed once more, since a preemption had thrown them away
    usual_ns: int = 0  # of a full one: the running median of the steps before it


class ProcessEventKind(str, Enum):
    """What happened to a process of the engine."""

    STARTED = "started"
    RESTARTED = "restarted"  # another process of the same kind was there before
    HUNG = "hung"  # silent, or steps no more while requests wait
    RECOVERED = "recovered"
    DEAD = "dead"
    STOPPED = "stopped"  # it was told to end, and did
    PLUGIN_DEGRADED = "plugin_degraded"  # a hook could not be set, or was taken off after repeated failure
    PLUGIN_LOST = "plugin_lost"  # events or datagrams lost
    TRANSFERS_STUCK = "transfers_stuck"  # fetches are open, neither their number nor what was transferred changes
    TRANSFERS_MOVING = "transfers_moving"
    PAUSED = "paused"  # it stood still for duration_ns; detail: why, a word of guest/pauses.py
    UNREACHABLE = "unreachable"  # its metrics page does not answer
    REACHABLE = "reachable"
    GPU_LOST = "gpu_lost"  # a GPU, or NVML as a whole, answers no more
    GPU_BACK = "gpu_back"
    GPU_STUCK = "gpu_stuck"  # a call into the driver does not return
    GPU_XID = "gpu_xid"  # the driver reported an error of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """One event of one engine process."""

    process: Process
    source: Source
    at_unix_ns: int
    kind: ProcessEventKind
    engine: str = ""
    engine_id: str | None = None
    pid: int | None = None
    process_kind: str | None = None  # api | core | worker; sidecar: our own beside it
    detail: str = ""  # plain words, no data of requests
    at_bound_ns: int = 0  # happened at most this much before
    count: int = 0  # how many were lost
    duration_ns: int = 0  # of a pause, which begins at at_unix_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is: sent at its start and again every few minutes, so that a restarted collector knows."""

    process: Process
    source: Source
    at_unix_ns: int
    engine: str
    engine_version: str | None = None
    engine_id: str | None = None
    pid: int | None = None
    model: str | None = None
    model_revision: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None  # tokens
    block_bytes: int | None = None  # one block, all layers of one rank; None where groups differ
    kv_layout: str | None = None
    kv_blocks: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_rank: int | None = None
    connector: str | None = None
    connector_role: str | None = None
    lease_ns: int | None = None
    failure_policy: str | None = None
    transport: str | None = None  # nixl 1.5.1 | ...
    agents: tuple[str, ...] = ()  # the transport's names of this engine's ranks
    plugin_version: str | None = None
    capabilities: tuple[str, ...] = ()  # what the plugin could hook
    missing: tuple[str, ...] = ()  # and what it could not


PluginSpan = EngineTimes | KvFetch | KvPublish
"""Records that travel as spans of scope ``handrail.plugin``; provisional ones travel as events."""

PluginEvent = Iteration | ProcessEvent | EngineFacts
"""Records that travel as log records of scope ``handrail.events``."""

Record = Exchange | EngineRequest | RouterCall
"""What a span of a proxy, an engine or a router says of one request."""

Observation = Record | PluginSpan | PluginEvent
"""Everything that a source may hand on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong or odd about one request, in closed words plus the ids that show it."""

    kind: str
    detail: str = ""
    evidence: tuple[str, ...] = field(default=())


# --- what logs and metrics pages say --------------------------------------------------------------------------------------


class LogKind(str, Enum):
    """What a line of an engine's log says about KV; the recognisers of ``kv/loglines.py`` each name one."""

    FETCH_FAILED = "fetch_failed"  # a transfer of one request's blocks failed, on either side
    HANDSHAKE_FAILED = "handshake_failed"
    NOTIFICATION_FAILED = "notification_failed"  # the read went well, its producer does not know
    REGISTRATION_FAILED = "registration_failed"  # a push or a bootstrap could not be announced
    EXPIRED = "expired"  # the producer freed blocks nobody had read in time
    STALE_READ = "stale_read"  # blocks were read after the producer had freed them
    READ_DECLINED = "read_declined"  # the reader saw that the lease was over and did not read
    REQUEST_FAILED_BY_KV = "request_failed_by_kv"
    RECOMPUTED = "recomputed"
    BAD_HANDOFF = "bad_handoff"  # transfer parameters missing or not usable
    COMPAT_MISMATCH = "compat_mismatch"
    PEER_LOST = "peer_lost"  # the other engine is gone, as this one sees it
    PEER_REPLACED = "peer_replaced"
    LINK_ERROR = "link_error"  # below requests: a slice, a session, an endpoint
    TRANSFER_RETRIED = "transfer_retried"
    CACHE_SHORT = "cache_short"  # a cache tier gave fewer tokens than it had promised
    CACHE_LOOKUP = "cache_lookup"
    TRANSFER_STATS = "transfer_stats"
    QUEUE_STATS = "queue_stats"
    TRANSPORT = "transport"  # which transport a data path uses
    SLOW_SUBMISSION = "slow_submission"
    TELEMETRY_OFF = "telemetry_off"
    ENGINE_ERROR = "engine_error"
    ENGINE_DEAD = "engine_dead"


FAILED_FETCH_KINDS = frozenset({LogKind.FETCH_FAILED, LogKind.HANDSHAKE_FAILED, LogKind.REQUEST_FAILED_BY_KV, LogKind.RECOMPUTED})
"""Kinds that, with a request id, say that this request's fetch failed; counted once a request however many lines say it."""


class LineClock(str, Enum):
    """Where the time of a log fact comes from."""

    LINE = "line"  # the line's own stamp
    WRAPPER = "wrapper"  # what collected the line (a container runtime) stamped it
    RECEIPT = "receipt"  # when we read it


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """What one or several lines of a log say: equal facts of several ranks, and repeats, are one with a count.

    Of source ``metrics``: a counter of failures grew by ``lines`` between ``at_unix_ns`` and ``last_unix_ns``; it names nobody.
    The same ``fact_id`` with a higher ``revision`` is an update, and the later one wins. Nothing but the fields here ever leaves:
    no text of a line, so no prompt.
    """

    process: Process
    source: Source
    fact_id: str  # 16 hex digits, the same when a line is read again
    kind: LogKind
    recogniser: str  # which row of the table: "vllm.nixl.expired"
    at_unix_ns: int  # of the first line
    last_unix_ns: int
    clock: LineClock
    resolution_ns: int = 0  # of the stamps: 1 s for vLLM's
    level: str = ""
    lines: int = 1
    ranks: tuple[str, ...] = ()  # processes that said it, as their lines name them
    request_id: str | None = None  # raw, in the engine's form
    peer_request_id: str | None = None
    engine_id: str | None = None
    peer_engine_id: str | None = None
    peer: str | None = None  # host:port
    room: str | None = None  # SGLang's bootstrap room
    failure: str | None = None  # a word of the engine: transfer_setup_failed
    reason: str | None = None  # a code out of a closed grammar: NIXL_ERR_REMOTE_DISCONNECT, KeyError
    numbers: tuple[tuple[str, float], ...] = ()  # by name, unit in the name; a figure the line lacks is absent
    words: tuple[tuple[str, str], ...] = ()  # other allow-listed fields: transport, nic
    inferred: tuple[str, ...] = ()  # fact ids of lines below requests that fit by time alone
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineValue:
    """One number of an engine's metrics page in our schema (``families/schema.py``), in base units."""

    name: str
    value: float
    engine: str = ""  # the engine's own ``engine`` label (a data-parallel rank); '' where there is none
    label: str = ""  # value of the quantity's one label: a reason, a source, a stage
    start_unix_ns: int = 0  # counters: since when it counts, as far as we know; 0 for gauges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistogram:
    """One histogram: ``counts`` per bucket, one more than ``bounds``. ``total`` is None where the engine's sum makes no sense."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    total: float | None
    engine: str = ""
    label: str = ""
    start_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape of an engine or router. What its page lacks is absent, never 0."""

    process: Process
    source: Source
    at_unix_ns: int
    model: str = ""  # where the page names exactly one
    values: tuple[EngineValue, ...] = ()
    histograms: tuple[EngineHistogram, ...] = ()


class SchemaState(str, Enum):
    """How a family of an engine's page differs from what this release's table expects first."""

    MISSING = "missing"  # no name of this quantity is there
    RENAMED = "renamed"  # only a name that other versions use
    BOTH = "both"  # old and new at once: the new one is read
    UNIT_CHANGED = "unit_changed"  # read, converted
    UNKNOWN = "unknown"  # looks like one we know under a name we do not


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaNote:
    """One difference. ``seen`` is the family as exposed, '' for a missing one."""

    state: SchemaState
    quantity: str
    seen: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReport:
    """Sent once at start and whenever the page's families change."""

    process: Process
    source: Source
    at_unix_ns: int
    emitters: tuple[str, ...]  # whose families are there: vllm, nixl, sglang, ...
    notes: tuple[SchemaNote, ...] = ()
