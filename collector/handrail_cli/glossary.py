"""Explain the closed enums in plain words, for a person who reads one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PHASE: Final[Mapping[str, str]] = {
    "prefill_admission": "taking the request in at P, before its scheduler knew it",
    "prefill_queue": "waiting for P's scheduler",
    "prefill_compute": "computing the prompt on P",
    "prefill_respond": "P answering after its first token",
    "decode_admission": "taking the request in at D, before its scheduler knew it",
    "kv_wait": "waiting on D for free KV blocks or for a free slot to load them",
    "kv_handshake": "the first contact from D to P",
    "kv_transfer": "moving the KV blocks from P to D",
    "kv_notice": "D noticing that the KV blocks arrived",
    "decode_queue": "waiting for D's scheduler",
    "first_step": "D's first step",
    "decode_respond": "the first token leaving D",
    "router_and_hops": "the router and the network around P and D",
    "router": "the router itself",
    "prefill_hops": "the network between router and P",
    "decode_hops": "the network between router and D",
    "unattributed": "time that no evidence explains",
}

OUTCOME: Final[Mapping[str, str]] = {
    "ok": "answered in full",
    "http_error": "answered with an HTTP error",
    "stream_error": "an error inside a stream that had begun with HTTP 200",
    "incomplete": "the server reports that the answer is incomplete",
    "truncated": "the stream ended without a finish_reason and without [DONE]",
    "unknown_finish": "the stream ended with [DONE] but without a finish_reason",
    "client_disconnect": "the client disconnected",
    "upstream_disconnect": "the server closed the connection in the middle of the answer",
    "upstream_unreachable": "the server could not be reached",
    "timed_out": "no answer arrived in time",
    "aborted": "the engine reports that the request was aborted",
    "tainted": "answered in full, from KV that cannot be trusted",
    "unknown": "no evidence shows how the request ended",
}
GOOD_OUTCOMES: Final = frozenset({"ok"})
NEUTRAL_OUTCOMES: Final = frozenset({"incomplete", "client_disconnect", "unknown", "unknown_finish"})

SCOPE: Final[Mapping[str, str]] = {
    "edge": "as the client saw it",
    "decode": "from the request's arrival at D; the time before that is not measured",
    "engine": "as the engine reports it; no proxy observed the request",
}

JOIN: Final[Mapping[str, str]] = {
    "opened": "opened this row",
    "connector": "same KV hand-off key (kv_transfer_params)",
    "engine_id": "same request id inside one engine",
    "ancestor": "same trace, under a span that Handrail sent",
    "request_key": "same request id, while the edge's request was open",
}

SOURCE: Final[Mapping[str, str]] = {
    "proxy": "measured by the sidecar's proxy",
    "otlp": "the engine's own span",
    "proxy+otlp": "between the timestamps of the proxy and of the engine's span, on one clock",
    "edge-proxy": "the edge's time less what P and D took",
    "otlp-proxy": "between two of the router's calls, less what P took",
    "clocks": "between timestamps of two hosts, within the bound of their clock offset",
    "edge": "measured by the edge's proxy",
    "plugin": "reported by the plugin in the engine",
    "proxy+plugin": "between the timestamps of the proxy and of the plugin, on one clock",
    "plugin-preempted": "the part of it during which the request was preempted",
    "plugin-peer": "by the clock of the engine that pushed the KV",
    "middleware": "measured by the middleware in the engine",
}

KV_OUTCOME: Final[Mapping[str, str]] = {
    "ok": "D got the KV blocks from P",
    "failed": "D could not fetch the KV blocks",
    "recomputed": "D recomputed the prompt after the KV fetch failed",
    "retried": "D fetched the KV blocks in a later attempt",
    "expired": "P freed the KV blocks before D read them",
    "stale_read": "D read KV blocks that P may already have reused",
    "wrong_request": "D read the KV blocks of another request",
    "timed_out": "the KV fetch did not end in time",
    "fallback_local": "D computed the prompt itself instead of fetching the KV",
    "hung": "the KV fetch neither ended nor failed",
    "aborted": "the request was aborted during the KV fetch",
    "unknown": "no evidence shows how the KV fetch ended",
}

STALL: Final[Mapping[str, str]] = {
    "prefill_coscheduled": "the step also computed other prompts",
    "kv_landing": "the engine was busy with the KV fetch of another request",
    "preemption": "the engine recomputed KV that a preemption had discarded",
    "gpu_throttled": "the GPU throttled its clock",
    "host_pause": "a process on the path paused: no free processor, or garbage collection",
    "client_backpressure": "the client stopped reading, so the proxy stopped reading from the engine",
    "unknown": "no evidence explains it",
}

HINT: Final[Mapping[str, str]] = {
    "fake_stream": "the whole answer arrived in one burst at the end: it was not really streamed",
    "buffered": "a compression layer or a parser holds text back: chunks arrive later than their tokens were made",
    "stream_close_missing": "neither [DONE] nor a close followed finish_reason",
    "client_slow": "the client read more slowly than the server sent",
    "undecodable": "the stream could not be decoded, so its token times are unknown",
    "duplicate_request_id": "the request carried more than one X-Request-Id",
    "duplicate_traceparent": "the request carried more than one traceparent",
    "invalid_traceparent": "the request carried an invalid traceparent",
    "context_conflict": "traceparent and B3 disagreed; Handrail used traceparent",
    "long_request_id": "the X-Request-Id was longer than 128 characters; Handrail keeps its beginning and a hash",
    "retried": "the request was sent again",
    "reasoning_only": "the answer is empty: the model reasoned and stopped",
    "cache_probe": "the router first asked a decode engine whether its cache holds enough; this is no attempt and no error",
}

FINDING: Final[Mapping[str, str]] = {
    "ambiguous_request_id": "Handrail left that evidence out instead of guessing",
    "bad_attribute": "Handrail did not use those figures",
    "clocks_unknown": "no bound on the clock offset of the two hosts is known yet, so it may have happened outside this request",
    "answered_after_failure": "the answer cannot be trusted",
    "engine_hung": "its process or its scheduler stopped while this request was there",
    "engine_lost": "its open requests are lost",
    "engine_stopped": "it was asked to stop; its open requests ended with it",
    "engine_restarted": "its open requests are lost, and its peers must repeat the handshake",
    "handoff_near_lease": "with a little more delay, P frees the blocks before D reads them",
    "handoff_over_lease": "P may have freed the blocks before D read them",
    "kv_bytes_short": "some blocks may hold wrong data",
    "kv_mismatch": "one of them may misread the KV that the other wrote",
    "no_handoff_data": "this is a mistake of the router, not a failed transfer",
    "prefill_error": "D answered without a prefill",
    "return_failed": "P recomputed those tokens",
    "stale_read": "D may have answered from blocks that another request overwrote",
    "waiting_after_failure": "the engine put it back into its queue and never resumed it",
    "context_lost": "a process on the path dropped traceparent; Handrail joined by ids",
    "duplicate_request_id": "each has a row of its own",
    "fallback_local": "the prefill's work was wasted",
    "model_mismatch": "the processes on the path name different models",
    "prefill_retried": "the path shows the attempt whose KV D read",
    "request_id_reused": "Handrail still joins by trace and KV keys",
    "wrong_request": "D may have answered from another request's KV blocks",
}
"""Consequences of findings; the finding itself holds the evidence."""
SEVERE_FINDINGS: Final = frozenset(
    {
        "wrong_request",
        "model_mismatch",
        "fallback_local",
        "stale_read",
        "kv_mismatch",
        "prefill_error",
        "answered_after_failure",
        "engine_lost",
        "engine_stopped",
        "engine_hung",
        "engine_restarted",
        "handoff_over_lease",
    }
)

PLACE: Final[Mapping[str, str]] = {"prefill": "P", "decode": "D", "path": "path"}


def plain(word: str, table: Mapping[str, str]) -> str:
    """Return the word's meaning.

    A word from a newer collector is shown as it is.
    """
    return table.get(word, word.replace("_", " "))


def tone(outcome: str) -> str:
    """Return the colour of an outcome."""
    return "green" if outcome in GOOD_OUTCOMES else "yellow" if outcome in NEUTRAL_OUTCOMES else "red"


def finding(text: str) -> str:
    """Return a finding (``kind: detail``) with its consequence."""
    kind, _, detail = text.partition(":")
    lines = [kind, *([detail.strip()] if detail.strip() else [])]
    return ": ".join(lines) + (f"; {FINDING[kind]}" if kind in FINDING else "")
