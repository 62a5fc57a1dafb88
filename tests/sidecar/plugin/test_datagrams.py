"""Datagrams between plugin and sidecar: records arrive, garbage is refused."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail.plugin import events as words
from handrail.plugin.events import FIELDS, MAX_DATAGRAM_BYTES, datagrams
from handrail_sidecar.sources.datagram import read_packet

_VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "i": st.integers(0, 2**63 - 1),
    "s": st.text(max_size=40),
    "b": st.booleans(),
    "m": st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=9), max_size=4),
}
_HEAD: Final = {"boot": "ab12", "pid": 7, "kind": words.CORE, "monotonic_ns": 5, "unix_ns": 10**18}


@st.composite
def _events(draw: st.DrawFn) -> tuple[Any, ...]:
    name = draw(st.sampled_from(sorted(FIELDS)))
    values = [
        draw(_VALUES[kind[0]] | st.none()) if kind.endswith("?") else draw(_VALUES[kind[0]]) for kind in FIELDS[name].values()
    ]
    return (name, draw(st.integers(0, 2**62)), *values)


def received(data: bytes) -> list[tuple[Any, ...]]:
    return [(event.name, event.at_ns, *event.fields.values()) for event in read_packet(data).events]


@settings(suppress_health_check=[HealthCheck.too_slow])  # a first run builds its tables of characters
@given(st.lists(_events(), max_size=20))
def test_datagrams_decode_to_what_was_encoded(statements: list[tuple[Any, ...]]) -> None:
    ((data,), _) = datagrams(statements, sequence=3, lost=2, **_HEAD)  # type: ignore[arg-type]
    packet = read_packet(data)
    assert received(data) == statements
    assert (packet.boot, packet.pid, packet.kind, packet.sequence) == ("ab12", 7, "core", 3)
    assert (packet.monotonic_ns, packet.unix_ns, packet.lost, packet.unread) == (5, 10**18, 2, 0)


def test_many_events_are_split_into_numbered_datagrams_in_order() -> None:
    statements = [(words.LOG, at, "ERROR", "x" * 3000) for at in range(40)]
    packets, _ = datagrams(statements, sequence=1, lost=0, **_HEAD)  # type: ignore[arg-type]
    assert all(len(data) <= MAX_DATAGRAM_BYTES for data in packets)
    assert [read_packet(data).sequence for data in packets] == list(range(1, len(packets) + 1))
    assert [event for data in packets for event in received(data)] == statements


def test_what_fits_no_datagram_or_is_no_json_is_counted_not_sent() -> None:
    good = (words.FIRST_TOKEN, 1, "r")
    statements = [(words.LOG, 1, "ERROR", "x" * MAX_DATAGRAM_BYTES), (words.FIRST_TOKEN, 1, object()), good]
    ((data,), _) = datagrams(statements, sequence=1, lost=4, **_HEAD)  # type: ignore[arg-type]
    assert (received(data), read_packet(data).lost) == ([good], 6)


def test_no_events_are_a_sign_of_life() -> None:
    ((data,), _) = datagrams([], sequence=9, lost=0, **_HEAD)  # type: ignore[arg-type]
    assert read_packet(data).events == ()


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|datagram|types|long"):
        read_packet(data)


@pytest.mark.parametrize(
    "found",
    [
        {},
        [],
        [2, "b", 1, "core", 1, 1, 1, 0, []],
        [True, "b", 1, "core", 1, 1, 1, 0, []],
        [1, "", 1, "core", 1, 1, 1, 0, []],
        [1, "b", -1, "core", 1, 1, 1, 0, []],
        [1, "b", 1, "core", 1, 1, 1.5, 0, []],
        [1, "b", 1, "core", 1, 1, 2**63, 0, []],
        [1, "b", 1, "core", 1, 1, 1, 0, {}],
        [1, "b" * 600, 1, "core", 1, 1, 1, 0, []],
        [1, "b", 1, "core", 1, 1, 1, 0],
    ],
    ids=str,
)
def test_wrong_heads_are_refused(found: object) -> None:
    with pytest.raises(ValueError, match=r"datagram|types"):
        read_packet(json.dumps(found).encode())


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        read_packet(b"[" * 20_000)


@pytest.mark.parametrize(
    "event",
    [
        5,
        [],
        ["first_token"],
        ["from_the_future", 1],
        ["first_token", -1, "r"],
        ["first_token", 1, 5],
        ["first_token", 1, None],
        ["first_token", 1, "r" * 600],
        ["step", 1, 2],
        ["facts", 1, {"a": {"b": 1}}],
        ["facts", 1, []],
        ["kv_noticed", 1, "r", 1],
        ["finished", 1, "r", "FINISHED_STOPPED", -1],
    ],
    ids=str,
)
def test_an_event_that_is_none_is_counted(event: object) -> None:
    packet = read_packet(json.dumps([1, "b", 1, "core", 1, 1, 1, 0, [event, ["first_token", 1, "r", "a later field"]]]).encode())
    assert ([plugin_datagram_event.name for plugin_datagram_event in packet.events], packet.unread) == (["first_token"], 1)


@pytest.mark.parametrize("lone", [b"\\ud800", b"\\uDFFF"])
def test_half_a_surrogate_pair_is_escaped_as_records_carry_it(lone: bytes) -> None:
    """A lone surrogate is escaped, since protobuf cannot carry it in a record.

    A whole pair is a character.
    """
    ((data,), _) = datagrams([(words.QUEUED, 1, "r_\U0001f600", None, None, None)], sequence=1, lost=0, **_HEAD)  # type: ignore[arg-type]
    ((_, _, request, *_),) = received(data.replace(b"r_", b"r" + lone))
    assert request == "r" + lone.decode().lower() + "\U0001f600"


def test_what_is_not_utf_8_is_no_datagram() -> None:
    ((data,), _) = datagrams([(words.FIRST_TOKEN, 1, "r_")], sequence=1, lost=0, **_HEAD)  # type: ignore[arg-type]
    for bad in (b"\xff", b"\xed\xa0\x80"):
        with pytest.raises(ValueError, match="not JSON"):
            read_packet(data.replace(b"r_", b"r" + bad))


def test_a_wall_clock_that_no_record_can_carry_is_refused() -> None:
    """Otherwise each record of that process would be dropped: it would make no span."""
    ((data,), _) = datagrams([(words.FIRST_TOKEN, 5, "r"), (words.FIRST_TOKEN, 2**63 - 1, "r")], sequence=1, lost=0, **_HEAD)  # type: ignore[arg-type]
    packet = read_packet(data)
    assert ([event.at_ns for event in packet.events], packet.unread) == ([5], 1)
    with pytest.raises(ValueError, match="wall clock"):
        read_packet(data.replace(b"5,1000000000000000000", b"5,4", 1))
