"""Schema of all quantities from engines' metrics pages, under our own names.

Exposed and sent as ``handrail_engine_`` + name (a counter with ``_total``). Base units: seconds, bytes, tokens, ratios
from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class QuantityKind(str, Enum):
    """Kind of number that a quantity is."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One row. ``label``: the one label it has besides ``engine``, '' for none."""

    name: str
    kind: QuantityKind
    unit: str  # UCUM, as OTLP has it
    help: str
    label: str = ""


_G, _C, _H = QuantityKind.GAUGE, QuantityKind.COUNTER, QuantityKind.HISTOGRAM

QUANTITIES: Final = (
    # --- queues and memory
    Quantity("requests_running", _G, "{request}", "Requests being computed"),
    Quantity("requests_waiting", _G, "{request}", "Requests waiting for the scheduler"),
    Quantity("requests_waiting_by_reason", _G, "{request}", "Waiting requests, by reason", "reason"),
    Quantity("kv_queue_requests", _G, "{request}", "Requests in each stage of a KV hand-off", "stage"),
    Quantity("kv_cache_usage_ratio", _G, "1", "Share of the KV cache in use"),
    Quantity("prefix_cache_hit_ratio", _G, "1", "Share of prefix cache hits, as the engine averages it"),
    Quantity("lora_adapters", _G, "{adapter}", "Adapters in the last scheduled batch", "state"),
    Quantity("start_time_seconds", _G, "s", "Unix time at which the engine began to count"),
    # --- requests and tokens
    Quantity("preemptions", _C, "{preemption}", "Requests preempted from the batch"),
    Quantity("requests_finished", _C, "{request}", "Finished requests, including aborts and errors", "reason"),
    Quantity("requests_rejected", _C, "{request}", "Requests refused at admission", "reason"),
    Quantity("requests_corrupted", _C, "{request}", "Requests with NaN in their logits"),
    Quantity("prompt_tokens", _C, "{token}", "Prompt tokens of finished prefills"),
    Quantity("prompt_tokens_by_source", _C, "{token}", "Prompt tokens, by the origin of their KV", "source"),
    Quantity("prompt_tokens_cached", _C, "{token}", "Prompt tokens that were in a cache"),
    Quantity("prompt_tokens_recomputed", _C, "{token}", "Prompt tokens computed although they were in a cache or transferred"),
    Quantity("generation_tokens", _C, "{token}", "Generated tokens"),
    Quantity("prefix_cache_queried_tokens", _C, "{token}", "Tokens looked up in the engine's own prefix cache"),
    Quantity("prefix_cache_hit_tokens", _C, "{token}", "Tokens found in the engine's own prefix cache"),
    Quantity("external_cache_queried_tokens", _C, "{token}", "Tokens looked up through the KV connector or a cache tier", "tier"),
    Quantity(
        "external_cache_hit_tokens",
        _C,
        "{token}",
        "Tokens matched through the KV connector or a cache tier; a load may still fail",
        "tier",
    ),
    # --- KV hand-offs
    Quantity("kv_transfer_failures", _C, "{failure}", "Failure events of transfers, not requests", "transport"),
    Quantity("kv_handshake_failures", _C, "{failure}", "Failed bootstraps or handshakes", "transport"),
    Quantity("kv_notification_failures", _C, "{failure}", "Notifications that the engine could not send", "transport"),
    Quantity("kv_receive_failures", _C, "{failure}", "Failed receives", "transport"),
    Quantity(
        "kv_expired_requests",
        _C,
        "{request}",
        "Requests whose blocks the producer freed unread (counted at the producer)",
        "transport",
    ),
    Quantity(
        "kv_late_notifications", _C, "{notification}", "Reads that the producer noticed after it freed the blocks", "transport"
    ),
    Quantity("kv_prefill_retries", _C, "{retry}", "Repeated prefills"),
    Quantity("kv_transfer_seconds", _H, "s", "Time of one transfer, as the transport's poll saw it", "transport"),
    Quantity("kv_post_seconds", _H, "s", "Time to submit one transfer", "transport"),
    Quantity("kv_transfer_bytes", _H, "By", "Bytes of one transfer", "transport"),
    Quantity("kv_transfer_descriptors", _H, "{descriptor}", "Descriptors of one transfer", "transport"),
    Quantity("kv_handshake_seconds", _H, "s", "Time until both sides were ready", "transport"),
    Quantity("kv_allocation_seconds", _H, "s", "Wait for space at the receiver", "transport"),
    Quantity("tier_retrieve_seconds", _H, "s", "Time to retrieve KV from a cache tier", "tier"),
    # --- latencies as the engine counts them
    Quantity("ttft_seconds", _H, "s", "Arrival to first token, as the engine counts"),
    Quantity("inter_token_seconds", _H, "s", "Between output events (vLLM: events, not tokens)"),
    Quantity("e2e_seconds", _H, "s", "Arrival to the end"),
    Quantity("queue_seconds", _H, "s", "Queued to scheduled; at a vLLM decode this includes the whole KV wait"),
    Quantity("prefill_seconds", _H, "s", "Scheduled to first token"),
    Quantity("decode_seconds", _H, "s", "First to last token"),
    Quantity("iteration_tokens", _H, "{token}", "Tokens of one step; its count is the number of steps"),
    # --- transports that export on their own
    Quantity("transport_sent_bytes", _C, "By", "Bytes sent by one agent"),
    Quantity("transport_received_bytes", _C, "By", "Bytes received by one agent"),
    Quantity("transport_errors", _C, "{error}", "Errors of one agent, by status", "status"),
    Quantity("transport_read_bytes", _C, "By", "Bytes read, by transport", "transport"),
    Quantity("transport_written_bytes", _C, "By", "Bytes written, by transport", "transport"),
    Quantity("transport_failovers", _C, "{failover}", "Switches away from a transport", "transport"),
    # --- routers
    Quantity("router_requests", _C, "{request}", "Requests that the router split over P and D", "route"),
    Quantity("router_prefill_requests", _C, "{request}", "Requests sent to each prefill worker", "worker"),
    Quantity("router_decode_requests", _C, "{request}", "Requests sent to each decode worker", "worker"),
    Quantity("router_errors", _C, "{error}", "Errors, by the side that caused them", "side"),
    Quantity("router_worker_up", _G, "{worker}", "1 while the router considers the worker healthy", "worker"),
    Quantity(
        "router_pending_decodes",
        _G,
        "{request}",
        "Requests with a finished prefill that the router has not sent to decode yet",
        "worker",
    ),
    Quantity("router_active_decodes", _G, "{request}", "Requests decoding now", "worker"),
    Quantity("router_active_prefill_tokens", _G, "{token}", "Prompt tokens being prefilled now", "worker"),
    Quantity("router_queued_requests", _G, "{request}", "Requests queued in the router or front end"),
    Quantity("router_active_requests", _G, "{request}", "Requests inside the router or front end"),
    Quantity("router_request_seconds", _H, "s", "A request as the router sees it", "route"),
)

BY_NAME: Final = {quantity.name: quantity for quantity in QUANTITIES}
