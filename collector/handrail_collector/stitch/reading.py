"""From OTLP spans to records: which span says what about one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from handrail.conventions import BATCH_SEQ, SCOPE_PROXY
from handrail.engines import load_all
from handrail.export.spans import process_of, read_exchange
from handrail.otlp.values import Attributes
from handrail.records import Process, Record


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one scope, with who sent them. ``seq`` is None for spans that no sidecar numbered."""

    process: Process
    scope: str
    seq: int | None
    spans: Sequence[Span]


def batches(resource_spans: ResourceSpans) -> Iterator[Batch]:
    """One batch a scope."""
    process = process_of(resource_spans.resource)
    for scoped in resource_spans.scope_spans:
        seq = next((a.value.int_value for a in scoped.scope.attributes if a.key == BATCH_SEQ), None)
        yield Batch(process, scoped.scope.name, seq, scoped.spans)


class SpanReader:
    """Asks the proxy's own reader, then the engine adapters; counts what looked like evidence and could not be read."""

    def __init__(self) -> None:
        self.unreadable = 0
        self._adapters = load_all()

    def read(self, span: Span, scope: str, process: Process, attributes: Attributes) -> Record | None:
        """The record of ``span``; None when it says nothing about one request, or nothing that can be used."""
        if scope == SCOPE_PROXY:
            try:
                return read_exchange(span, process, attributes)
            except ValueError:
                self.unreadable += 1
                return None
        for adapter in self._adapters:
            if adapter.claims(span, scope):
                return adapter.read(span, process, attributes)
        return None
