"""How many connections a gate admits, from which peers, and its messages."""

from __future__ import annotations

import logging

import pytest

from handrail.config.listeners import ConnectionsConfig
from handrail.runtime.connections import (
    MOST_CONNECTIONS,
    QUIET_S,
    Bounds,
    Expiry,
    Gate,
    Gates,
    Refusal,
    connection_rows,
)
from handrail.runtime.descriptors import DescriptorBudget

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Clock:
    """A clock in seconds that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def budget(limit: int = 1000, used: int = 0, reserved: int = 100) -> DescriptorBudget:
    return DescriptorBudget(limit, reserved, count=lambda: used)


def gate(listener: int, peer: int, clock: Clock | None = None) -> Gate:
    return Gate("api", Bounds(listener=listener, peer=peer), budget(), clock=clock or Clock())


def test_one_peer_cannot_take_what_others_need() -> None:
    doors = gate(listener=5, peer=3)
    assert [doors.admit(A) for _ in range(5)] == [None, None, None, Refusal.PEER, Refusal.PEER]
    assert doors.admit(B) is None
    assert (doors.open, doors.refused[Refusal.PEER]) == (4, 2)
    doors.leave(A)
    assert doors.admit(A) is None


def test_listener_holds_so_many_in_all() -> None:
    doors = gate(listener=3, peer=3)
    assert [doors.admit(peer) for peer in (A, B, C, A)] == [None, None, None, Refusal.LISTENER]
    doors.leave(C)
    assert doors.admit(A) is None
    assert doors.refused == {Refusal.PEER: 0, Refusal.LISTENER: 1, Refusal.DESCRIPTORS: 0}


def test_nothing_is_remembered_of_peers_that_left() -> None:
    doors = gate(listener=3, peer=3)
    for number in range(1000):
        assert doors.admit(f"10.0.{number // 256}.{number % 256}") is None
        doors.leave(f"10.0.{number // 256}.{number % 256}")
    assert doors._peers == {}
    assert doors.open == 0


def test_refusals_are_logged_once_a_reason_and_again_after_a_quiet_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    doors = gate(listener=2, peer=1, clock=clock)
    for peer in (A, A, A, B, C, C):
        doors.admit(peer)
    assert [record.message for record in caplog.records] == [
        "api refuses connections: 127.0.0.2 holds 1 connections (connections.max_per_peer); further ones are counted in "
        "handrail_connections_refused_total (0 before)",
        "api refuses connections: all of its 2 connections are in use (connections.max_per_listener); further ones are counted "
        "in handrail_connections_refused_total (0 before)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    caplog.clear()
    for _ in range(3):  # it goes on: nothing new to report
        clock.now += QUIET_S - 1
        doors.admit(C)
    assert caplog.records == []
    clock.now += QUIET_S
    doors.admit(C)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.endswith("(5 before)")


def test_descriptors_decide_whether_there_is_room() -> None:
    shared = DescriptorBudget(100, 40, count=lambda: 50)
    plain = Gate("api", Bounds(listener=50, peer=50), shared)
    threefold = Gate("otlp_grpc", Bounds(listener=50, peer=50, descriptors=3), shared)
    for _ in range(2):
        assert threefold.has_room()
        assert threefold.admit(A) is None
    for _ in range(2):
        assert plain.has_room()
        plain.admit(A)
    assert not threefold.has_room()  # 2 are left
    assert plain.has_room()
    threefold.leave(A)
    assert threefold.has_room()


@pytest.mark.parametrize(
    ("share", "descriptors", "listener", "peer"),
    [
        pytest.param(256, 1, 256, 64, id="a quarter for a peer"),
        pytest.param(256, 3, 85, 64, id="but 64 at least"),
        pytest.param(99, 3, 33, 33, id="and not more than the listener"),
        pytest.param(10**6, 1, MOST_CONNECTIONS, 1024, id="a bound of its own"),
        pytest.param(0, 3, 1, 1, id="one always"),
    ],
)
def test_bounds_follow_from_the_descriptors(share: int, descriptors: int, listener: int, peer: int) -> None:
    bounds = Bounds.of(ConnectionsConfig(), share, descriptors=descriptors)
    assert (bounds.listener, bounds.peer, bounds.descriptors) == (listener, peer, descriptors)


def test_bounds_that_are_configured() -> None:
    bounds = Bounds.of(ConnectionsConfig(max_per_listener=10_000, max_per_peer=20_000), 100)
    assert (bounds.listener, bounds.peer) == (10_000, 10_000)


def test_gates_share_what_is_not_reserved_and_are_on_the_metrics_page() -> None:
    gates = Gates(ConnectionsConfig(), budget(limit=1024, used=950, reserved=224), {"api": (1 / 4, 1), "otlp_grpc": (1 / 2, 4)})
    api, grpc = gates.gate("api"), gates.gate("otlp_grpc")
    assert (api.bounds.listener, grpc.bounds.listener) == (200, 100)
    assert gates.budget.in_use() == 950
    api.admit(A)
    api.refuse(Refusal.DESCRIPTORS, "none left")
    grpc.expired[Expiry.HEAD] += 2
    grpc.pause("short")
    rows = {row.name: row.read() for row in connection_rows(gates)}
    assert rows["handrail_descriptors_open"] == 951
    assert rows["handrail_descriptors_limit"] == 1024
    assert rows["handrail_connections_open"] == {("api",): 1.0, ("otlp_grpc",): 0.0}
    refused, expired, pauses = (rows[f"handrail_connections_{name}"] for name in ("refused", "expired", "accept_pauses"))
    assert isinstance(refused, dict)
    assert {key for key, count in refused.items() if count} == {("api", "descriptors")}
    assert isinstance(expired, dict)
    assert {key: count for key, count in expired.items() if count} == {("otlp_grpc", "head"): 2.0}
    assert pauses == {("api",): 0.0, ("otlp_grpc",): 1.0}
    assert "951 of 1024 descriptors" in gates.problem()
