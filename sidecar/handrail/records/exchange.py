"""One request as seen by a proxy, by an engine's own span or by a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from handrail.records.process import Process, Role, Source, SpanIds
from handrail.stalls import Stalls


class Outcome(str, Enum):
    """How one exchange ended at the process that observed it."""

    OK = "ok"
    HTTP_ERROR = "http_error"  # status 400 or above
    STREAM_ERROR = "stream_error"  # an error event inside HTTP 200, or response.failed
    INCOMPLETE = "incomplete"  # the server reports it itself: response.incomplete
    TRUNCATED = "truncated"  # a clean end with neither finish_reason nor [DONE]
    UNKNOWN_FINISH = "unknown_finish"  # [DONE] without a finish_reason
    CLIENT_DISCONNECT = "client_disconnect"
    UPSTREAM_DISCONNECT = "upstream_disconnect"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"  # the engine reports that the request was aborted
    TAINTED = "tainted"  # of a joined request: it ended well, on KV that could not be trusted (docs/outcomes.md)
    UNKNOWN = "unknown"


class Hint(str, Enum):
    """Oddities of a stream that are reported but never change a figure."""

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
    REASONING_ONLY = "reasoning_only"  # it ended on its own, and had reasoning but no answer after it
    CACHE_PROBE = "cache_probe"  # a router first queried a decode whether its cache holds enough, and it did not


@dataclass(frozen=True, slots=True, kw_only=True)
class KvParams:
    """Connector parameters of a request: ``kv_transfer_params`` (vLLM) or its like.

    They hold the connector keys that join P to D. MEASURED section 4c.
    """

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
        """Connector keys, strongest first.

        Each has its kind as a prefix, so that kinds never collide.
        """
        found = []
        if self.remote_engine_id and self.remote_request_id:
            found.append(f"vllm:{self.remote_engine_id}:{self.remote_request_id}")
        if self.transfer_id:
            found.append(f"mooncake:{self.transfer_id}")
        if self.bootstrap_room:
            found.append(f"sglang:{self.bootstrap_room}")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps between chunks with content, per choice index, of one stream.

    ``unit`` says whether a gap was divided by its tokens.
    """

    unit: str  # "chunk": stream gaps; "token": per-token ITL, weighted by tokens
    count: int
    sum_ns: int
    max_ns: int
    max_at_ns: int  # offset from arrival of the end of the largest gap
    sketch: bytes  # exponential_histogram.GapSketch.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFacts:
    """What one response showed; the defaults say that nothing of it was read.

    Offsets count from the request's arrival.
    """

    response_id: str | None = None
    model: str | None = None
    stream: bool | None = None  # from the response's content type
    error_type: str | None = None
    error_code: str | None = None
    ttfb_ns: int | None = None  # first byte of the response's body
    ttft_token_ns: int | None = None
    ttft_text_ns: int | None = None
    ttft_text_kind: str | None = None  # text | reasoning | tool_call | refusal
    last_content_ns: int | None = None
    finish_ns: int | None = None  # the event that carried finish_reason
    events: int = 0  # chunks with content
    gaps: Gaps | None = None
    itl: Gaps | None = None
    stalls: Stalls | None = None
    tpot_mean_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    kv_out: KvParams | None = None
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(ResponseFacts):
    """One HTTP request and its response, as a proxy or the middleware saw them."""

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
    choices: int | None = None  # n x prompts, as requested
    stream_requested: bool | None = None
    inspected: str = "whole"
    status: int | None = None
    forwarded_ns: int | None = None  # head sent upstream
    request_done_ns: int | None = None  # last body byte sent upstream
    first_delivered_ns: int | None = None  # first content byte handed to the client's socket
    write_blocked_ns: int = 0
    content_encoding: str | None = None
    kv_in: KvParams | None = None
    resend_count: int = 0
    exemplar: bool = False  # /metrics points to this trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine itself reported it (vLLM: the ``llm_request`` span).

    Durations are the engine's own.
    """

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


Record = Exchange | EngineRequest | RouterCall
"""Records from the span of a proxy, an engine or a router about one request."""
