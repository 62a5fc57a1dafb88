"""vLLM's own trace: one ``llm_request`` SERVER span a request.

The SDK and the exporters are those that vLLM 0.32 uses (``vllm/tracing``).
There is no hand-off span and no status: a failed request looks like an empty one with durations as long as the machine's uptime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """The figures in the span, in seconds as its attributes are."""

    request_id: str
    arrival_unix_ns: int
    end_unix_ns: int
    ttft_s: float
    e2e_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    inference_s: float
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    n: int
    temperature: float
    top_p: float


def exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Build the exporter for an ``endpoint`` as in vLLM's ``--otlp-traces-endpoint``.

    For http the endpoint includes ``/v1/traces``.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=True)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


class RequestSpans:
    """Makes and exports the spans.

    Batches and delays are the SDK's defaults (``OTEL_BSP_*``).
    """

    def __init__(self, spans: SpanExporter, service: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", service)
        own = {"vllm.instrumenting_module_name": "vllm.llm_engine", "vllm.process_id": str(os.getpid())}
        self._provider = TracerProvider(resource=Resource.create({"service.name": name, **own}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._provider.get_tracer("vllm.tracing.otel")
        self._propagator = TraceContextTextMapPropagator()

    def emit(self, headers: Mapping[str, str], figures: RequestFigures) -> None:
        """Export the span of one request.

        ``headers``: the request's, lower case. A valid ``traceparent`` is the parent; an unsampled one means no span.
        """
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            context=self._propagator.extract(dict(headers)),
            start_time=figures.arrival_unix_ns,
        )
        span.set_attribute("gen_ai.latency.time_to_first_token", figures.ttft_s)
        span.set_attribute("gen_ai.latency.e2e", figures.e2e_s)
        span.set_attribute("gen_ai.latency.time_in_queue", figures.queue_s)
        span.set_attribute("gen_ai.usage.prompt_tokens", figures.prompt_tokens)
        span.set_attribute("gen_ai.usage.completion_tokens", figures.completion_tokens)
        span.set_attribute("gen_ai.latency.time_in_model_prefill", figures.prefill_s)
        span.set_attribute("gen_ai.latency.time_in_model_decode", figures.decode_s)
        span.set_attribute("gen_ai.latency.time_in_model_inference", figures.inference_s)
        span.set_attribute("gen_ai.request.id", figures.request_id)
        span.set_attribute("gen_ai.request.top_p", figures.top_p)
        span.set_attribute("gen_ai.request.max_tokens", figures.max_tokens)
        span.set_attribute("gen_ai.request.temperature", figures.temperature)
        span.set_attribute("gen_ai.request.n", figures.n)
        span.end(figures.end_unix_ns)

    def close(self) -> None:
        """Export what is left; blocks for as long as the exporter takes."""
        self._provider.shutdown()
