"""vllm-router's own trace: one SERVER span a request and one CLIENT span a leg.

It is as measured on 0.1.17 with ``enable_trace``. The workers get the CLIENT spans as their parents.
The real CLIENT spans end seconds late; these end when the leg does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_SCOPE = "vllm-router"
_VERSION = "0.1.17"


class RouterSpans:
    """Makes and exports the spans. ``unix_ns``: the host's wall clock."""

    def __init__(self, spans: SpanExporter, unix_ns: Callable[[], int]) -> None:
        resource = Resource.create({"service.name": _SCOPE, "service.version": _VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(spans))
        self._tracer = self._provider.get_tracer(_SCOPE)
        self._propagator = TraceContextTextMapPropagator()
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

    def close(self) -> None:
        """Export what is left; blocks for as long as the exporter takes."""
        self._provider.shutdown()

    def _start(self, kind: SpanKind, path: str, context: Context, attributes: Mapping[str, str]) -> Span:
        return self._tracer.start_span(
            f"POST {path}", kind=kind, context=context, attributes=dict(attributes), start_time=self._unix_ns()
        )
