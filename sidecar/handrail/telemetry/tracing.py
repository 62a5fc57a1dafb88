"""Make spans of Handrail's own work.

A part that makes spans takes a tracer and gets ``NO_TRACES`` by default; only the processes know the SDK (``traces.py``).
Work that is done thousands of times a second has no span of its own (docs/decisions/0015-own-telemetry-by-the-sdk.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, StatusCode, Tracer, set_span_in_context

from handrail import conventions as names
from handrail.otlp.payload import delimited

NO_TRACES: Final = NoOpTracer()
"""Tracer of a part that nobody traces."""

WORTH_NS: Final = 5_000_000
"""Shortest work on the hot path that gets spans: three of them cost up to 200 us, export included, so at most 4 % of the work."""

_MARK: Final = delimited(1, names.SCOPE_OWN.encode())
"""Field ``name`` of the scope of our own spans, as it is encoded."""


def about_own_traces(payload: bytes) -> bool:
    """Whether an export request carries own spans of a process of Handrail's.

    Work on them is not traced: a process that receives its own spans would otherwise make new ones of them for ever.
    """
    return _MARK in payload


@contextmanager
def detached_span(tracer: Tracer, name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
    """Make a span that does not become the parent of others.

    A task that begins inside such a parent would keep it for its whole life.
    """
    span = tracer.start_span(name, Context(), attributes=attributes)
    try:
        yield
    except BaseException as error:
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, str(error))
        raise
    finally:
        span.end()


def record_span(
    tracer: Tracer,
    name: str,
    began_unix_ns: int,
    ended_unix_ns: int,
    attributes: Mapping[str, str | int],
    *,
    parent: Span | None = None,
) -> Span:
    """Make the span of work that is over."""
    context = set_span_in_context(parent) if parent is not None else Context()
    span = tracer.start_span(name, context, attributes=attributes, start_time=began_unix_ns)
    span.end(ended_unix_ns)
    return span
