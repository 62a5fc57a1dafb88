"""A tracer whose spans are kept in memory, and a backend for own traces."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from handrail.conventions import SCOPE_OWN


class KeptSpans(SpanExporter):
    """A backend that keeps every span; ``tracer`` sends to it at once.

    ``refusals``: how many batches it refuses first. ``gate``: a batch waits until it is set.
    """

    endpoint = "http://backend:4318"

    def __init__(self, refusals: int = 0) -> None:
        self.spans: list[ReadableSpan] = []
        self.refusals = refusals
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.closed = False
        provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self))
        self.tracer: Tracer = provider.get_tracer(SCOPE_OWN)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.gate.wait()
        if self.refusals:
            self.refusals -= 1
            return SpanExportResult.FAILURE
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS

    @property
    def current(self) -> SpanExporter:
        return self

    def close(self) -> None:
        self.closed = True
        self.gate.set()

    async def why(self) -> str:
        return "it is down"

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def payload(self) -> bytes:
        """All spans as one export request, as the SDK encodes them."""
        return encode_spans(self.spans).SerializeToString()
