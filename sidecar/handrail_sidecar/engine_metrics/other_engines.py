"""List metric families of SGLang, routers, transports and cache tiers.

They expose their own metrics. The names are from public sources and pages.
"""

from __future__ import annotations

from typing import Any, Final

from handrail_sidecar.engine_metrics.family import Family

_MB: Final = 2.0**20  # SGLang's MB


def _sglang(name: str, quantity: str, versions: str = "0.4-0.5.23", **more: Any) -> Family:
    return Family(name=f"sglang:{name}", quantity=quantity, versions=f"SGLang {versions}", **more)


SGLANG: Final = (
    _sglang("num_running_reqs", "requests_running", expected=True),
    _sglang("num_queue_reqs", "requests_waiting", expected=True),
    _sglang("token_usage", "kv_cache_usage_ratio", expected=True),
    _sglang("cache_hit_rate", "prefix_cache_hit_ratio"),
    _sglang("num_retracted_requests_total", "preemptions", "0.5-0.5.23"),
    _sglang("prompt_tokens_total", "prompt_tokens", expected=True),
    _sglang("generation_tokens_total", "generation_tokens", expected=True),
    _sglang("cached_tokens_total", "prompt_tokens_cached"),
    _sglang("num_requests_total", "requests_finished"),
    _sglang("num_prefill_bootstrap_queue_reqs", "kv_queue_requests", "0.5.10-0.5.23", fixed="prefill_bootstrap"),
    _sglang("num_prefill_prealloc_queue_reqs", "kv_queue_requests", "0.4.7-0.5.9", fixed="prefill_bootstrap"),
    _sglang("num_prefill_inflight_queue_reqs", "kv_queue_requests", "0.4.7-0.5.23", fixed="prefill_inflight"),
    _sglang("num_decode_prealloc_queue_reqs", "kv_queue_requests", "0.4.7-0.5.23", fixed="decode_prealloc"),
    _sglang("num_decode_transfer_queue_reqs", "kv_queue_requests", "0.4.7-0.5.23", fixed="decode_transfer"),
    _sglang("num_decode_deferred_kv_release_reqs", "kv_queue_requests", "0.5.20-0.5.23", fixed="decode_deferred_release"),
    _sglang("num_transfer_failed_reqs_total", "kv_transfer_failures", "0.4.9-0.5.23", fixed="sglang"),
    _sglang("num_bootstrap_failed_reqs_total", "kv_handshake_failures", "0.4.9-0.5.23", fixed="sglang"),
    _sglang("num_prefill_retries_total", "kv_prefill_retries", "0.5.10-0.5.23"),
    _sglang("kv_transfer_latency_ms", "kv_transfer_seconds", "0.5-0.5.23", scale=1e-3, fixed="sglang"),
    _sglang("kv_transfer_total_mb", "kv_transfer_bytes", "0.5.10-0.5.23", scale=_MB, fixed="sglang"),
    _sglang("kv_transfer_bootstrap_ms", "kv_handshake_seconds", "0.5.10-0.5.23", scale=1e-3, fixed="sglang"),
    _sglang("kv_transfer_alloc_ms", "kv_allocation_seconds", "0.5.10-0.5.23", scale=1e-3, fixed="sglang"),
    _sglang("time_to_first_token_seconds", "ttft_seconds", expected=True),
    _sglang("inter_token_latency_seconds", "inter_token_seconds", expected=True),
    _sglang("time_per_output_token_seconds", "inter_token_seconds", "0.4-0.4.6"),
    _sglang("e2e_request_latency_seconds", "e2e_seconds", expected=True),
    _sglang("queue_time_seconds", "queue_seconds", "0.5-0.5.23"),
)


def _router(prefix: str, versions: str, name: str, quantity: str, **more: Any) -> Family:
    return Family(name=f"{prefix}{name}", quantity=quantity, versions=versions, **more)


def _pd_router(prefix: str, versions: str) -> tuple[Family, ...]:
    rows = (
        ("pd_requests_total", "router_requests", "route"),
        ("pd_prefill_requests_total", "router_prefill_requests", "worker"),
        ("pd_decode_requests_total", "router_decode_requests", "worker"),
        ("worker_health", "router_worker_up", "worker"),
        ("pd_pending_decode_requests", "router_pending_decodes", "worker"),
        ("pd_active_decode_requests", "router_active_decodes", "worker"),
        ("pd_active_prefill_tokens", "router_active_prefill_tokens", "worker"),
        ("pd_request_duration_seconds", "router_request_seconds", "route"),
    )
    errors = ((side, f"pd_{side}_errors_total") for side in ("prefill", "decode", "stream"))
    always = {"router_requests", "router_worker_up"}
    return (
        *(_router(prefix, versions, name, quantity, label=label, expected=quantity in always) for name, quantity, label in rows),
        *(_router(prefix, versions, name, "router_errors", fixed=side) for side, name in errors),
    )


ROUTERS: Final = (
    *_pd_router("vllm_router_", "vllm-router 0.1"),
    *_pd_router("sgl_router_", "SGLang router 0.1-0.2"),
    *_pd_router("smg_", "SGLang gateway 0.3"),
    _router("dynamo_frontend_", "Dynamo 1.0-1.6", "queued_requests", "router_queued_requests"),
    _router("dynamo_frontend_", "Dynamo 1.0-1.6", "active_requests", "router_active_requests"),
    _router("dynamo_frontend_", "Dynamo 0.5-0.9", "inflight_requests", "router_active_requests"),
    _router("dynamo_frontend_", "Dynamo 0.5-1.6", "request_duration_seconds", "router_request_seconds"),
)


def _own(name: str, quantity: str, versions: str, **more: Any) -> Family:
    return Family(name=name, quantity=quantity, versions=versions, **more)


_NIXL: Final = "NIXL 0.9-1.3"
_LMCACHE: Final = "LMCache 0.3-0.5"
_TENT: Final = "Mooncake TENT"
_TRT: Final = "TensorRT-LLM 1.x"

LIBRARIES: Final = (
    _own("agent_tx_bytes_total", "transport_sent_bytes", _NIXL, expected=True),
    _own("agent_rx_bytes_total", "transport_received_bytes", _NIXL, expected=True),
    _own("agent_errors_total", "transport_errors", _NIXL, label="status"),
    _own("agent_xfer_time_us", "kv_transfer_seconds", _NIXL, scale=1e-6, fixed="nixl-agent"),
    _own("agent_xfer_post_time_us", "kv_post_seconds", _NIXL, scale=1e-6, fixed="nixl-agent"),
    _own("lmcache:num_requested_tokens_total", "external_cache_queried_tokens", _LMCACHE, fixed="lmcache", expected=True),
    _own("lmcache:num_hit_tokens_total", "external_cache_hit_tokens", _LMCACHE, fixed="lmcache", expected=True),
    _own("lmcache:time_to_retrieve", "tier_retrieve_seconds", _LMCACHE, fixed="lmcache"),
    _own("tent_read_bytes_total", "transport_read_bytes", _TENT, label="transport", expected=True),
    _own("tent_write_bytes_total", "transport_written_bytes", _TENT, label="transport", expected=True),
    _own("tent_transport_failover_total", "transport_failovers", _TENT, label="from"),
    _own("trtllm_kv_cache_utilization", "kv_cache_usage_ratio", _TRT, expected=True),
    _own("trtllm_kv_transfer_latency_seconds", "kv_transfer_seconds", _TRT, fixed="tensorrt-llm"),
    _own("trtllm_kv_transfer_bytes", "kv_transfer_bytes", _TRT, fixed="tensorrt-llm"),
    _own("process_start_time_seconds", "start_time_seconds", "Prometheus client, single process"),
)

ROWS: Final = (*SGLANG, *ROUTERS, *LIBRARIES)
