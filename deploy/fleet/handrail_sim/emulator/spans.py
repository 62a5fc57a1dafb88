"""The traces of vLLM and of vllm-router.

They are exported with the SDK and the exporters that vLLM 0.32 uses (``vllm/tracing``).
vLLM: one ``llm_request`` SERVER span a request. There is no hand-off span and no status: a failed request looks like an empty one
with durations as long as the machine's uptime.
vllm-router: one SERVER span a request and one CLIENT span a leg, as measured on 0.1.17 with ``enable_trace``. The workers get the
CLIENT spans as their parents. The real CLIENT spans end seconds late; these end when the leg does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, set_span_in_context
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


class _Spans:
    """Makes spans and exports them.

    Batches and delays are the SDK's defaults (``OTEL_BSP_*``).
    """

    def __init__(self, spans: SpanExporter, scope: str, resource: Mapping[str, str]) -> None:
        self._provider = TracerProvider(resource=Resource.create(dict(resource)), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._provider.get_tracer(scope)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Export what is left; blocks for as long as the exporter takes."""
        self._provider.shutdown()


class RequestSpans(_Spans):
    """vLLM's spans of requests."""

    def __init__(self, spans: SpanExporter, service: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", service)
        own = {"vllm.instrumenting_module_name": "vllm.llm_engine", "vllm.process_id": str(os.getpid())}
        super().__init__(spans, "vllm.tracing.otel", {"service.name": name, **own})

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


_SCOPE = "vllm-router"


class RouterSpans(_Spans):
    """vllm-router's spans. ``unix_ns``: the host's wall clock."""

    def __init__(self, spans: SpanExporter, unix_ns: Callable[[], int]) -> None:
        super().__init__(spans, _SCOPE, {"service.name": _SCOPE, "service.version": "0.1.17"})
        self._unix_ns = unix_ns

    def request(self, headers: Mapping[str, str], path: str, request_id: str) -> Span:
        """Begin the SERVER span of a request.

        ``headers``: the client's, lower case; a valid ``traceparent`` is the parent.
        """
        own = {"http.request.method": "POST", "url.path": path, "http.route": path, "request_id": request_id}
        return self._start(SpanKind.SERVER, path, self._propagator.extract(dict(headers)), own)

    def leg(self, request: Span, phase: str, worker: str, path: str) -> tuple[Span, dict[str, str]]:
        """Begin the CLIENT span of a call to ``worker`` (a base URL).

        Also returns the headers that carry the span there.
        """
        address = urlsplit(worker)
        own = {"http.request.method": "POST", "url.full": worker + path, "http.route": path, "vllm.request_phase": phase}
        own |= {"server.address": address.hostname or "", "server.port": str(address.port or 80)}
        span = self._start(SpanKind.CLIENT, path, set_span_in_context(request), own)
        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(span))
        return span, carried

    def end(self, span: Span, status: int | None) -> None:
        """End a span.

        ``status``: HTTP; None where there was no response. The attribute is a string, as in the real router.
        """
        if status is not None:
            span.set_attribute("http.response.status_code", str(status))
        span.end(self._unix_ns())

    def _start(self, kind: SpanKind, path: str, context: Context, attributes: Mapping[str, str]) -> Span:
        return self._tracer.start_span(
            f"POST {path}", kind=kind, context=context, attributes=dict(attributes), start_time=self._unix_ns()
        )
