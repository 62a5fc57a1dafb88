"""Write the stalls of a stream on its observer's span, and read them.

Two counts are attributes, and the longest stalls are events. ``read_stalls`` restores what ``write_stalls`` wrote. An event that
is absurd (no length, an end before its begin) is left out, and so is everything beyond ``KEPT`` events.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail import conventions as names
from handrail.otlp.values import LARGEST, Attributes, attributes_of
from handrail.stalls import KEPT, Stall, Stalls
from handrail.wire.codec import add_bytes, add_number, add_text, read_bytes, read_number, read_text

_TURN_CHARS: Final = 64


def write_stalls(span: Span, stalls: Stalls) -> None:
    """Append ``stalls`` to a span that begins at its request's arrival."""
    attributes = span.attributes
    add_number(attributes, names.STALL_COUNT, stalls.count)
    add_number(attributes, names.STALL_SUM_NS, stalls.sum_ns)
    if stalls.times:
        add_bytes(attributes, names.STALL_TIMES, stalls.times)
    if stalls.held_ns:
        add_number(attributes, names.STALL_HELD_NS, stalls.held_ns)
    for stall in stalls.longest:
        event = span.events.add(time_unix_nano=span.start_time_unix_nano + stall.end_ns, name=names.EVENT_STALL)
        statement = event.attributes
        add_number(statement, names.STALL_GAP_NS, stall.gap_ns)
        add_number(statement, names.STALL_MEDIAN_NS, stall.median_ns)
        add_number(statement, names.STALL_INDEX, stall.index)
        if stall.held_ns:
            add_number(statement, names.STALL_HELD_NS, stall.held_ns)
        if stall.turn:
            add_text(statement, names.STALL_TURN, stall.turn)


def read_stalls(span: Span, attributes: Attributes) -> Stalls | None:
    """Read the stalls on ``span``; None where there are none.

    ``attributes``: the span's own, decoded.
    """
    count, sum_ns = read_number(attributes.get(names.STALL_COUNT)), read_number(attributes.get(names.STALL_SUM_NS))
    if not count or sum_ns is None:
        return None
    longest: list[Stall] = []
    for event in span.events:
        if event.name == names.EVENT_STALL and len(longest) < KEPT:
            stall = _stall(event, span.start_time_unix_nano)
            if stall is not None:
                longest.append(stall)
    held_ns = read_number(attributes.get(names.STALL_HELD_NS)) or 0
    times = read_bytes(attributes.get(names.STALL_TIMES)) or b""
    return Stalls(count=max(count, len(longest)), sum_ns=sum_ns, longest=tuple(longest), times=times, held_ns=held_ns)


def _stall(event: Span.Event, start_unix_ns: int) -> Stall | None:
    statement = attributes_of(event.attributes)
    end_ns = event.time_unix_nano - start_unix_ns
    gap_ns, median_ns, index, held_ns = (
        read_number(statement.get(name))
        for name in (names.STALL_GAP_NS, names.STALL_MEDIAN_NS, names.STALL_INDEX, names.STALL_HELD_NS)
    )
    if gap_ns is None or median_ns is None or index is None or not gap_ns <= end_ns < LARGEST:
        return None
    turn = read_text(statement.get(names.STALL_TURN)) or ""
    return Stall(end_ns=end_ns, gap_ns=gap_ns, median_ns=median_ns, index=index, held_ns=held_ns or 0, turn=turn[:_TURN_CHARS])
