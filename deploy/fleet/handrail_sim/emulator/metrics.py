"""vLLM's /metrics, as far as the emulated engine can fill it honestly.

Names, labels and buckets are those of vLLM 0.32 (MEASURED 4a).
Left out: flops and memory estimates, prefix and multi-modal caches, sleep state, NIXL descriptors.
What vLLM gets wrong after a failed load (a queue time of minus the machine's uptime) is wrong here too, since readers have to
cope with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from handrail_sim.emulator.core import Ended, FinishReason, Load

_LENGTHS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_LATENCIES: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TRANSFER: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES: Final = tuple(float(2 << (10 + 2 * power)) for power in range(12))
_BATCH: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HTTP_HIGH: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)

HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "vllm:nixl_xfer_time_seconds": ("Histogram of transfer duration for NIXL KV Cache transfers.", _TRANSFER),
    "vllm:nixl_post_time_seconds": ("Histogram of transfer post time for NIXL KV Cache transfers.", (0.001, *_TRANSFER)),
    "vllm:nixl_bytes_transferred": ("Histogram of bytes transferred per NIXL KV Cache transfers.", _BYTES),
    "vllm:request_prompt_tokens": ("Number of prefill tokens processed.", _LENGTHS),
    "vllm:request_generation_tokens": ("Number of generation tokens processed.", _LENGTHS),
    "vllm:iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _BATCH),
    "vllm:request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "vllm:request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _LENGTHS),
    "vllm:time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST),
    "vllm:inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _BETWEEN),
    "vllm:request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _BETWEEN),
    "vllm:e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _LATENCIES),
    "vllm:request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _LATENCIES),
    "vllm:request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _LATENCIES),
    "vllm:request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _LATENCIES),
    "vllm:request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _LATENCIES),
}
COUNTERS: Final[dict[str, str]] = {
    "vllm:nixl_num_failed_transfers": "Number of failed NIXL KV Cache transfers, including handshake and notification failures.",
    "vllm:nixl_num_kv_expired_reqs": "Number of requests whose KV blocks expired before they were read.",
    "vllm:nixl_num_notifications_after_expiry": "Number of notifications that came after the blocks had expired.",
    "vllm:external_prefix_cache_queries": "External prefix cache queries, in tokens.",
    "vllm:external_prefix_cache_hits": "External prefix cache hits, in tokens.",
    "vllm:num_preemptions": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens": "Number of prefill tokens processed.",
    "vllm:generation_tokens": "Number of generation tokens processed.",
}
GAUGES: Final[dict[str, str]] = {
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_STAGES: Final = ("waiting_to_start", "in_progress", "completed_waiting")
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")


class EngineMetrics:
    """One engine's registry.

    ``monotonic_s`` serves only the figures that vLLM computes from stamps that were never set.
    """

    def __init__(self, model_name: str, *, reads_kv: bool, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.registry = CollectorRegistry()
        for collector in (GCCollector, PlatformCollector, ProcessCollector):
            collector(registry=self.registry)
        labels, own = ("engine", "model_name"), {"engine": "0", "model_name": model_name}
        self._histograms = {
            name: Histogram(name, text, labels, buckets=buckets, registry=self.registry).labels(**own)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(name, text, labels, registry=self.registry).labels(**own) for name, text in COUNTERS.items()
        }
        self._gauges = {name: Gauge(name, text, labels, registry=self.registry).labels(**own) for name, text in GAUGES.items()}
        stages = ("engine", "model_name", "stage")
        self._stages: dict[str, Gauge] = {}
        if reads_kv:
            by_stage = Gauge("vllm:num_requests_kv_fetch_by_stage", "Requests by KV fetch stage.", stages, registry=self.registry)
            self._stages = {stage: by_stage.labels(**own, stage=stage) for stage in _STAGES}
        reasons = ("engine", "model_name", "finished_reason")
        success = Counter("vllm:request_success", "Count of successfully processed requests.", reasons, registry=self.registry)
        self._ended = {reason: success.labels(**own, finished_reason=reason) for reason in _REASONS}
        sources = ("engine", "model_name", "source")
        by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", sources, registry=self.registry
        )
        self._sources = {source: by_source.labels(**own, source=source) for source in _SOURCES}
        http = ("handler", "method", "status")
        self._http_requests = Counter(
            "http_requests", "Total number of requests by method, status and handler.", http, registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Latency by handler.",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1),
            registry=self.registry,
        )
        self._http_high = Histogram(
            "http_request_duration_highr_seconds", "Latency with many buckets.", buckets=_HTTP_HIGH, registry=self.registry
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def seen(self, load: Load, kv_usage: float) -> None:
        """Set the gauges, after every change of the core."""
        self._gauges["vllm:num_requests_running"].set(load.running)
        self._gauges["vllm:num_requests_waiting"].set(load.waiting)
        self._gauges["vllm:kv_cache_usage_perc"].set(kv_usage)
        if self._stages:
            self._stages["waiting_to_start"].set(load.to_load)
            self._stages["in_progress"].set(load.loading)
            self._stages["completed_waiting"].set(load.loaded)

    def step(self, tokens: int) -> None:
        self._histograms["vllm:iteration_tokens_total"].observe(tokens)

    def gap(self, gap_s: float) -> None:
        self._histograms["vllm:inter_token_latency_seconds"].observe(gap_s)

    def tokens(self, count: int) -> None:
        self._counters["vllm:generation_tokens"].inc(count)

    def preempted(self) -> None:
        self._counters["vllm:num_preemptions"].inc()

    def first_token(self, ttft_s: float, prompt_tokens: int, loaded: bool, cached_tokens: int = 0) -> None:
        """Count the prompt's tokens when the first output appears, as vLLM does."""
        self._histograms["vllm:time_to_first_token_seconds"].observe(ttft_s)
        self._counters["vllm:prompt_tokens"].inc(prompt_tokens)
        self._sources["external_kv_transfer" if loaded else "local_compute"].inc(prompt_tokens - cached_tokens)
        self._sources["local_cache_hit"].inc(cached_tokens)

    def matched(self, tokens: int) -> None:
        """Count the prompt tokens found at another engine, before they are loaded."""
        self._counters["vllm:external_prefix_cache_queries"].inc(tokens)
        self._counters["vllm:external_prefix_cache_hits"].inc(tokens)

    def transferred(self, seconds: float, post_s: float, size: int) -> None:
        self._histograms["vllm:nixl_xfer_time_seconds"].observe(seconds)
        self._histograms["vllm:nixl_post_time_seconds"].observe(post_s)
        self._histograms["vllm:nixl_bytes_transferred"].observe(size)

    def transfer_failed(self) -> None:
        self._counters["vllm:nixl_num_failed_transfers"].inc()

    def lease_expired(self) -> None:
        self._counters["vllm:nixl_num_kv_expired_reqs"].inc()

    def notified_late(self) -> None:
        self._counters["vllm:nixl_num_notifications_after_expiry"].inc()

    def ended(self, ended: Ended, *, e2e_s: float, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """Count a request that the engine itself finished.

        vLLM records nothing for a request that its client gave up.
        """
        self._ended[ended.reason.value].inc()
        times = ended.times
        queued_s = times.queued_ns / 1e9
        if ended.reason is FinishReason.ERROR:
            # stamps never set are 0.0 in vLLM, and its first-token and last-token stamps are those of the failing output
            scheduled_s, first_s, last_s = 0.0, self._monotonic_s(), self._monotonic_s()
        else:
            scheduled_s = (times.scheduled_ns or 0) / 1e9
            first_s, last_s = (times.first_token_ns or 0) / 1e9, (times.last_token_ns or 0) / 1e9
        self._histograms["vllm:e2e_request_latency_seconds"].observe(e2e_s)
        self._histograms["vllm:request_queue_time_seconds"].observe(scheduled_s - queued_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(first_s - scheduled_s)
        self._histograms["vllm:request_inference_time_seconds"].observe(last_s - scheduled_s)
        self._histograms["vllm:request_decode_time_seconds"].observe(last_s - first_s)
        self._histograms["vllm:request_prompt_tokens"].observe(prompt_tokens)
        self._histograms["vllm:request_generation_tokens"].observe(ended.generated)
        self._histograms["vllm:request_params_n"].observe(n)
        self._histograms["vllm:request_params_max_tokens"].observe(max_tokens)
        per_token_s = (last_s - first_s) / (ended.generated - 1) if ended.generated > 1 else 0.0
        self._histograms["vllm:request_time_per_output_token_seconds"].observe(per_token_s)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(handler, method).observe(seconds)
        self._http_high.observe(seconds)
