"""List vLLM's metric families.

The names of 0.32 are from recorded pages, of 0.26 from a published list, older ones from public pages and changes.
A name is deprecated in X.Y, hidden in X.Y+1 and removed in X.Y+2, so both names are there for a while (case D08).
"""

from __future__ import annotations

from typing import Any, Final

from handrail_sidecar.engine_metrics.family import Family

_STAGE: Final = "stage"


def _row(name: str, quantity: str, versions: str = "0.9-0.33", **more: Any) -> Family:
    return Family(name=f"vllm:{name}", quantity=quantity, versions=f"vLLM {versions}", **more)


def _transport(name: str) -> tuple[Family, ...]:
    """Return the families that vLLM keeps for one KV connector."""
    rows = (
        ("xfer_time_seconds", "kv_transfer_seconds"),
        ("post_time_seconds", "kv_post_seconds"),
        ("bytes_transferred", "kv_transfer_bytes"),
        ("num_descriptors", "kv_transfer_descriptors"),
        ("num_failed_transfers_total", "kv_transfer_failures"),
        ("num_failed_notifications_total", "kv_notification_failures"),
        ("num_failed_recvs_total", "kv_receive_failures"),
        ("num_kv_expired_reqs_total", "kv_expired_requests"),
        ("num_notifications_after_expiry_total", "kv_late_notifications"),
    )
    always = {"kv_transfer_seconds", "kv_transfer_bytes", "kv_transfer_failures"}
    return tuple(
        _row(f"{name}_{each}", quantity, "0.11-0.33", fixed=name, expected=quantity in always) for each, quantity in rows
    )


ROWS: Final = (
    _row("num_requests_running", "requests_running", expected=True),
    _row("num_requests_waiting", "requests_waiting", expected=True),
    _row("num_requests_waiting_by_reason", "requests_waiting_by_reason", "0.24-0.33", label="reason"),
    _row("num_requests_kv_fetch_by_stage", "kv_queue_requests", "0.31-0.33", label=_STAGE),
    _row("kv_cache_usage_perc", "kv_cache_usage_ratio", "0.10-0.33", expected=True),
    _row("gpu_cache_usage_perc", "kv_cache_usage_ratio", "0.1-0.11"),
    _row("num_preemptions_total", "preemptions", expected=True),
    _row("request_success_total", "requests_finished", label="finished_reason", expected=True),
    _row("admission_rejections_total", "requests_rejected", "0.31-0.33", label="reason"),
    _row("corrupted_requests_total", "requests_corrupted"),
    _row("prompt_tokens_total", "prompt_tokens", expected=True),
    _row("prompt_tokens_by_source_total", "prompt_tokens_by_source", "0.18-0.33", label="source"),
    _row("prompt_tokens_cached_total", "prompt_tokens_cached", "0.18-0.33"),
    _row("prompt_tokens_recomputed_total", "prompt_tokens_recomputed", "0.18-0.26"),
    _row("generation_tokens_total", "generation_tokens", expected=True),
    _row("prefix_cache_queries_total", "prefix_cache_queried_tokens", "0.10-0.33", expected=True),
    _row("gpu_prefix_cache_queries_total", "prefix_cache_queried_tokens", "0.8-0.11"),
    _row("prefix_cache_hits_total", "prefix_cache_hit_tokens", "0.10-0.33", expected=True),
    _row("gpu_prefix_cache_hits_total", "prefix_cache_hit_tokens", "0.8-0.11"),
    _row("external_prefix_cache_queries_total", "external_cache_queried_tokens", "0.13-0.33", fixed="connector"),
    _row("external_prefix_cache_hits_total", "external_cache_hit_tokens", "0.13-0.33", fixed="connector"),
    _row("time_to_first_token_seconds", "ttft_seconds", "0.3-0.33", expected=True),
    _row("inter_token_latency_seconds", "inter_token_seconds", "0.11-0.33", expected=True),
    _row("time_per_output_token_seconds", "inter_token_seconds", "0.3-0.13"),
    _row("e2e_request_latency_seconds", "e2e_seconds", "0.3-0.33", expected=True),
    _row("request_queue_time_seconds", "queue_seconds", "0.6-0.33", expected=True),
    _row("request_prefill_time_seconds", "prefill_seconds", "0.6-0.33"),
    _row("request_decode_time_seconds", "decode_seconds", "0.6-0.33"),
    _row("iteration_tokens_total", "iteration_tokens", "0.6-0.33", expected=True),
    _row("generation_tokens_created", "start_time_seconds"),
    *_transport("nixl"),
    *_transport("mooncake"),
)

LORA: Final = "vllm:lora_requests_info"
"""Family of LoRA adapters: its latest series is the valid one (case D15).

Its value is a time and its labels are lists.
"""
