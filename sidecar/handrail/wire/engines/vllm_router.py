"""Adapter for vllm-router's own spans (0.1.17, ``enable_trace=True``).

There is one SERVER span a request and one CLIENT span a leg. Measured: the SERVER span and all starts are right; its CLIENT
spans end seconds late (3.2 s inside a 61 ms SERVER span), so their ends are not read at all.
"""

from __future__ import annotations

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.values import Attributes, attributes_of, integer, text
from handrail.records import Process, Record, Role, RouterCall, Source
from handrail.wire.engines.vllm import interval, span_ids

SCOPE = "vllm-router"


class VllmRouterAdapter:
    """Reader of vllm-router's SERVER and CLIENT spans."""

    name = "vllm-router"

    def claims(self, span: Span, scope: str) -> bool:
        """Claim by instrumentation scope, which the router sets to its own name."""
        return scope == SCOPE

    def read(self, span: Span, process: Process, attributes: Attributes | None = None) -> Record | None:
        """Read the span; None for one that is neither SERVER nor CLIENT."""
        if span.kind not in (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT):
            return None
        values = attributes_of(span.attributes) if attributes is None else attributes
        server = span.kind == Span.SPAN_KIND_SERVER
        start, end, _ = interval(span)
        address, port = text(values, "server.address"), integer(values, "server.port")
        phase = text(values, "vllm.request_phase")
        return RouterCall(
            process=process,
            source=Source.OTLP,
            ids=span_ids(span),
            router=self.name,
            kind="server" if server else "client",
            start_unix_ns=start,
            end_unix_ns=end if server else None,
            phase=Role(phase) if phase in ("prefill", "decode") else None,
            request_id=text(values, "request_id"),
            peer=f"{address}:{port}" if address and port and not server else None,
            path=text(values, "http.route"),
            status=integer(values, "http.response.status_code"),
        )
