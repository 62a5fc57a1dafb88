"""Stalls on the wire: read back as written, with absurd events and attributes too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from builders.records import EPOCH, MS
from handrail import conventions as names
from handrail.otlp.values import attributes_of
from handrail.stalls import KEPT, Stall, Stalls, pack_times
from handrail.wire.exchange import read_stalls, write_stalls

_NS = st.integers(0, 2**40)


@st.composite
def _stalls(draw: st.DrawFn) -> Stalls:
    longest = []
    for index in range(draw(st.integers(0, KEPT))):
        gap_ns = draw(_NS)
        turn = draw(st.sampled_from(["", "reasoning>text"]))
        longest.append(
            Stall(end_ns=gap_ns + draw(_NS), gap_ns=gap_ns, median_ns=draw(_NS), index=index, held_ns=draw(_NS), turn=turn)
        )
    times = pack_times([(stall.begin_ns, stall.end_ns) for stall in longest])
    more = draw(st.integers(0, 1000))
    return Stalls(count=len(longest) + more + 1, sum_ns=draw(_NS), longest=tuple(longest), times=times, held_ns=draw(_NS))


def written(stalls: Stalls) -> Span:
    span = Span(start_time_unix_nano=EPOCH)
    write_stalls(span, stalls)
    return Span.FromString(span.SerializeToString())


def read(span: Span) -> Stalls | None:
    return read_stalls(span, attributes_of(span.attributes))


@given(_stalls())
def test_stalls_are_read_back(stalls: Stalls) -> None:
    assert read(written(stalls)) == stalls


ONE = Stalls(
    count=1, sum_ns=300 * MS, longest=(Stall(end_ns=900 * MS, gap_ns=300 * MS, median_ns=10 * MS, index=7),), times=b"", held_ns=0
)


def _without(name: str) -> Callable[[Span], None]:
    def change(span: Span) -> None:
        kept = [each for each in span.events[0].attributes if each.key != name]
        del span.events[0].attributes[:]
        span.events[0].attributes.extend(kept)

    return change


def _as(name: str, **value: object) -> Callable[[Span], None]:
    def change(span: Span) -> None:
        _without(name)(span)
        span.events[0].attributes.append(KeyValue(key=name, value=AnyValue(**value)))  # type: ignore[arg-type]

    return change


def _at(unix_ns: int) -> Callable[[Span], None]:
    def change(span: Span) -> None:
        span.events[0].time_unix_nano = unix_ns

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_without(names.STALL_GAP_NS), id="no-length"),
        pytest.param(_without(names.STALL_MEDIAN_NS), id="nothing-to-compare-with"),
        pytest.param(_without(names.STALL_INDEX), id="no-index"),
        pytest.param(_as(names.STALL_GAP_NS, int_value=-1), id="shorter-than-nothing"),
        pytest.param(_as(names.STALL_GAP_NS, int_value=901 * MS), id="begins-before-its-request"),
        pytest.param(_as(names.STALL_GAP_NS, int_value=2**63 - 1), id="three-centuries"),
        pytest.param(_as(names.STALL_GAP_NS, string_value="long"), id="words"),
        pytest.param(_at(EPOCH - 1), id="ends-before-its-request"),
        pytest.param(_at(0), id="no-time"),
        pytest.param(_at(2**64 - 1), id="at-the-end-of-time"),
    ],
)
def test_an_absurd_event_is_left_out_and_the_counts_stand(change: Callable[[Span], None]) -> None:
    span = written(ONE)
    change(span)
    found = read(span)
    assert found is not None
    assert (found.count, found.sum_ns, found.longest) == (1, 300 * MS, ())


def test_events_beyond_the_reported_ones_are_not_kept() -> None:
    span = written(ONE)
    for _ in range(10_000):
        span.events.append(span.events[0])
    span.events.append(Span.Event(name="exception"))
    found = read(span)
    assert found is not None
    assert len(found.longest) == KEPT
    assert found.count == KEPT  # never fewer than the single stalls


def test_a_turn_of_any_length_is_cut() -> None:
    span = written(ONE)
    _as(names.STALL_TURN, string_value="x" * 100_000)(span)
    found = read(span)
    assert found is not None
    assert len(found.longest[0].turn) == 64


@pytest.mark.parametrize("name", [names.STALL_COUNT, names.STALL_SUM_NS])
def test_a_span_without_the_counts_tells_of_none(name: str) -> None:
    span = written(ONE)
    kept = [each for each in span.attributes if each.key != name]
    del span.attributes[:]
    span.attributes.extend(kept)
    assert read(span) is None
