"""Contract of an engine adapter: turn an engine's or router's spans into records."""

from __future__ import annotations

from typing import Protocol

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.values import Attributes
from handrail.records import Process, Record


class EngineAdapter(Protocol):
    """Reader of the spans of one engine or router.

    ``claims`` is cheap and exact: at most one adapter claims a span. ``read`` returns None for spans that are not about one
    request (start-up, health). It never raises on odd values: absurd ones are left out and named in ``dropped_attributes``.
    The span belongs to the caller and is not changed; ``attributes`` are its own, where the caller has decoded them already.
    """

    name: str

    def claims(self, span: Span, scope: str) -> bool: ...

    def read(self, span: Span, process: Process, attributes: Attributes | None = None) -> Record | None: ...
