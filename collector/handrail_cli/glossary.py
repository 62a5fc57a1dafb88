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
    "kv_wait": "waiting on D for free KV blocks or a load slot",
    "kv_handshake": "the first contact from D to P",
    "kv_transfer": "moving the KV blocks from P to D",
    "kv_notice": "D noticing that the KV blocks had arrived",
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
    "incomplete": "the server itself says that the answer is incomplete",
    "truncated": "the stream ended without a finish_reason and without [DONE]",
    "unknown_finish": "the stream ended with [DONE] but without a finish_reason",
    "client_disconnect": "the client went away",
    "upstream_disconnect": "the server closed the connection in the middle of the answer",
    "upstream_unreachable": "the server could not be reached",
    "timed_out": "nothing came in time",
    "aborted": "the engine says that the request was aborted",
    "tainted": "answered in full, from KV that cannot be trusted",
    "unknown": "how it ended is not known",
}
GOOD_OUTCOMES: Final = frozenset({"ok"})
NEUTRAL_OUTCOMES: Final = frozenset({"incomplete", "client_disconnect", "unknown", "unknown_finish"})

SCOPE: Final[Mapping[str, str]] = {
    "edge": "as the client saw it",
    "decode": "from its arrival at D; what lay before is not seen",
    "engine": "as the engine reports it; no proxy saw the request",
}

JOIN: Final[Mapping[str, str]] = {
    "opened": "opened this row",
    "connector": "same KV hand-off key (kv_transfer_params)",
    "engine_id": "same request id inside one engine",
    "ancestor": "same trace, under a span that Handrail sent",
    "request_key": "same request id, while the edge's was open",
}

SOURCE: Final[Mapping[str, str]] = {
    "proxy": "measured by the sidecar's proxy",
    "otlp": "the engine's own span",
    "proxy+otlp": "between the proxy's and the engine's stamp, one clock",
    "edge-proxy": "the edge's time less what P and D took",
    "otlp-proxy": "between two of the router's calls, less what P took",
    "clocks": "between stamps of two hosts, whose clocks are bounded by what caused what",
    "edge": "measured by the edge's proxy",
    "plugin": "reported by the plugin in the engine",
    "proxy+plugin": "between the proxy's stamp and the engine's own, one clock",
    "plugin-preempted": "of that, the time that it stood preempted",
    "plugin-peer": "by the clock of the engine that pushed the KV",
    "middleware": "measured by the middleware in the engine",
}

KV_OUTCOME: Final[Mapping[str, str]] = {
    "ok": "D got the KV blocks from P",
    "failed": "D could not load the KV blocks",
    "recomputed": "D recomputed the prompt after the load had failed",
    "retried": "D loaded the KV blocks on a further try",
    "expired": "P had freed the KV blocks before D read them",
    "stale_read": "D read KV blocks that P may already have reused",
    "wrong_request": "D read the KV blocks of another request",
    "timed_out": "the load did not end in time",
    "fallback_local": "D computed the prompt itself instead of loading",
    "hung": "the load neither ended nor failed",
    "aborted": "the request was aborted while it loaded",
    "unknown": "no evidence says how the KV load ended",
}

STALL: Final[Mapping[str, str]] = {
    "prefill_coscheduled": "the step also computed other prompts",
    "kv_landing": "the engine was busy with the KV load of another request",
    "preemption": "it, or others, computed again what a preemption had thrown away",
    "gpu_throttled": "the GPU's clock was held down",
    "host_pause": "a process on the way had no processor, or collected garbage",
    "client_backpressure": "the client took nothing, so nothing more was read",
    "unknown": "nothing that is known explains it",
}

HINT: Final[Mapping[str, str]] = {
    "fake_stream": "the whole answer arrived in one burst at the end, so the stream is one in name only",
    "buffered": "a compression layer or a parser holds text back, so chunk times are later than token times",
    "stream_close_missing": "after finish_reason came neither [DONE] nor a close",
    "client_slow": "the client took bytes slower than they came",
    "undecodable": "the stream could not be decoded, so its token times are not known",
    "duplicate_request_id": "the request carried more than one X-Request-Id",
    "duplicate_traceparent": "the request carried more than one traceparent",
    "invalid_traceparent": "the request carried an invalid traceparent",
    "context_conflict": "traceparent and B3 disagreed; traceparent won",
    "long_request_id": "the X-Request-Id was longer than 128 characters and is kept clipped, with a hash",
    "retried": "the request was sent again",
    "reasoning_only": "the answer is empty: the model reasoned and stopped",
    "cache_probe": "a decode was asked first whether its cache holds enough; that is no try and no error",
}

FINDING: Final[Mapping[str, str]] = {
    "ambiguous_request_id": "that evidence was left out rather than guessed",
    "bad_attribute": "those figures were not used",
    "clocks_unknown": "nothing relates the clocks of the two hosts yet, so that it happened within this request is not proved",
    "answered_after_failure": "the answer cannot be trusted",
    "engine_hung": "its process stood, or its engine did, while this request was there",
    "engine_lost": "what was open there is lost",
    "engine_stopped": "it was told to end; what was open there went with it",
    "engine_restarted": "what was open there is lost, and its peers have to make contact anew",
    "handoff_near_lease": "a little longer, and P frees the blocks before D reads them",
    "handoff_over_lease": "P may have freed the blocks before D read them",
    "kv_bytes_short": "some blocks may not be what they should be",
    "kv_mismatch": "KV that one wrote may mean something else to the other",
    "no_handoff_data": "a router's mistake, no failed transfer",
    "prefill_error": "what D answers rests on no prefill",
    "return_failed": "P computed those tokens again",
    "stale_read": "D may have answered from blocks that another request wrote meanwhile",
    "waiting_after_failure": "the engine put it back to wait and did not go on with it",
    "context_lost": "something on the way dropped traceparent; the join rests on ids",
    "duplicate_request_id": "each is a row of its own",
    "fallback_local": "the prefill's work was wasted",
    "model_mismatch": "the processes on the path name different models",
    "prefill_retried": "the one whose KV was read is on the path",
    "request_id_reused": "trace and KV keys still join",
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
