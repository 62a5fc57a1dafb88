"""Trace context on the wire: W3C Trace Context (strict) and B3 (read only).

Sources: W3C Trace Context level 1 section 3.2; openzipkin/b3-propagation. Two ``traceparent`` lines are invalid and are never
joined with a comma (case C02). Where both conventions are present and disagree, ``traceparent`` wins and a hint reports it
(case C13).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from handrail import identity
from handrail.records import Hint, SpanIds

SAMPLED = 0x01

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.S)
_B3_SINGLE = re.compile(rb"([0-9a-fA-F]{16}|[0-9a-fA-F]{32})-([0-9a-fA-F]{16})(?:-([01d]))?(?:-[0-9a-fA-F]{16})?\Z")
_HEX = re.compile(rb"[0-9a-fA-F]+\Z")


class Origin(str, Enum):
    """Origin of an exchange's trace id."""

    INBOUND = "inbound"  # a valid traceparent
    B3 = "b3"
    DERIVED = "derived"  # from the request key
    RANDOM = "random"  # no context and no request key


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Remote parent.

    Ids are lower-case hex; ``flags`` are the W3C trace flags (bit 0: sampled).
    """

    trace_id: str
    span_id: str
    flags: int


@dataclass(frozen=True, slots=True)
class Inbound:
    """Trace context in a request's headers.

    ``denied``: no ids, but the caller asked not to be sampled (``b3: 0``).
    """

    context: TraceContext | None
    origin: Origin
    hints: tuple[Hint, ...] = ()
    denied: bool = False

    @property
    def client_parent(self) -> str:
        """Span id of the caller, or ''."""
        return self.context.span_id if self.context else ""


def extract(headers: Sequence[tuple[bytes, bytes]]) -> Inbound:
    """Read the context from raw header pairs (any case, duplicates included)."""
    parents: list[bytes] = []
    b3: dict[bytes, bytes] = {}
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"traceparent":
            parents.append(value.strip())
        elif lowered == b"b3" or lowered.startswith(b"x-b3-"):
            b3[lowered] = value.strip()
    hints: list[Hint] = []
    context = None
    if len(parents) > 1:
        hints.append(Hint.DUPLICATE_TRACEPARENT)
    elif parents:
        context = parse_traceparent(parents[0])
        if context is None:
            hints.append(Hint.INVALID_TRACEPARENT)
    zipkin, denied = _parse_b3(b3) if b3 else (None, False)
    if context is not None:
        if zipkin is not None and zipkin.trace_id != context.trace_id:
            hints.append(Hint.CONTEXT_CONFLICT)
        return Inbound(context, Origin.INBOUND, tuple(hints))
    if zipkin is not None:
        return Inbound(zipkin, Origin.B3, tuple(hints))
    return Inbound(None, Origin.DERIVED, tuple(hints), denied)


def parse_traceparent(value: bytes) -> TraceContext | None:
    """Parse a strict ``traceparent``; None for an invalid one.

    Later versions may append fields.
    """
    found = _TRACEPARENT.match(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    bits = int(flags, 16)
    return TraceContext(trace_id.decode(), span_id.decode(), bits if version == b"00" else bits & SAMPLED)


def format_traceparent(ids: SpanIds) -> bytes:
    """``traceparent`` header that makes ``ids`` the parent at the receiver."""
    return b"00-%s-%s-%02x" % (ids.trace_id.encode(), ids.span_id.encode(), ids.flags & 0xFF)


def continue_from(inbound: Inbound, key: str | None, *, exported: bool) -> tuple[SpanIds, Origin]:
    """Make our own span below ``inbound``.

    It is a new random span id in the caller's trace, with the caller's flags. Without a caller's context the trace id is derived
    from the request ``key`` (random where there is none either). Then it is sampled only when the engine's exporter reports to us
    (``exported``): otherwise the engine would export it to a backend whose operator did not ask for it.
    """
    span_id = identity.new_span_id()
    if inbound.context is not None:
        caller = inbound.context
        return SpanIds(
            trace_id=caller.trace_id, span_id=span_id, parent_span_id=caller.span_id, flags=caller.flags
        ), inbound.origin
    flags = SAMPLED if exported and not inbound.denied else 0
    if key is None:
        return SpanIds(trace_id=identity.new_trace_id(), span_id=span_id, flags=flags), Origin.RANDOM
    return SpanIds(trace_id=identity.derive_trace_id(key), span_id=span_id, flags=flags), Origin.DERIVED


def _parse_b3(headers: dict[bytes, bytes]) -> tuple[TraceContext | None, bool]:
    single = headers.get(b"b3")
    if single is not None:
        if single in (b"0", b"1", b"d"):
            return None, single == b"0"
        found = _B3_SINGLE.match(single)
        return (_b3_context(found[1], found[2], found[3]), False) if found else (None, False)
    trace_id, span_id = headers.get(b"x-b3-traceid"), headers.get(b"x-b3-spanid")
    sampled = b"d" if headers.get(b"x-b3-flags") == b"1" else headers.get(b"x-b3-sampled")
    sampled = {b"true": b"1", b"false": b"0"}.get(sampled or b"", sampled)
    if trace_id is None or span_id is None:
        return None, sampled == b"0"
    if len(trace_id) not in (16, 32) or len(span_id) != 16 or not (_HEX.match(trace_id) and _HEX.match(span_id)):
        return None, sampled == b"0"
    return _b3_context(trace_id, span_id, sampled), False


def _b3_context(trace_id: bytes, span_id: bytes, sampled: bytes | None) -> TraceContext | None:
    trace, span = trace_id.lower().rjust(32, b"0"), span_id.lower()
    if not trace.strip(b"0") or not span.strip(b"0"):
        return None
    return TraceContext(trace.decode(), span.decode(), SAMPLED if sampled in (b"1", b"d") else 0)
