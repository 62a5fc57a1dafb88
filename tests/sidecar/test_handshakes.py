"""The order and the rate in which handshakes begin."""

from __future__ import annotations

from collections.abc import Callable

from handrail.runtime.handshakes import Begin, HandshakeQueue

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Time:
    """A clock, and a loop's timers on it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds > 0
        self._calls.append((self.now_s + seconds, call))

    def pass_s(self, seconds: float) -> None:
        """Let time pass; each timer fires at its own time."""
        until_s = self.now_s + seconds
        while self._calls and min(at_s for at_s, _ in self._calls) <= until_s:
            due = min(self._calls, key=lambda call: call[0])
            self._calls.remove(due)
            self.now_s = due[0]
            due[1]()
        self.now_s = until_s

    @property
    def timers(self) -> int:
        return len(self._calls)


class Begun:
    """The handshakes that have begun, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, *, open_: bool = True) -> Begin:
        def begin() -> bool:
            if open_:
                self.names.append(name)
            return open_

        return begin


def made(rate: float = 10.0, burst: int = 1) -> tuple[HandshakeQueue, Time, Begun]:
    time = Time()
    return HandshakeQueue(rate=rate, burst=burst, clock=time, later=time.later), time, Begun()


def test_first_after_a_quiet_time_begin_at_once() -> None:
    queue, time, begun = made(burst=3)
    for name in ("a", "b", "c", "d"):
        queue.enter(A, begun(name))
    assert begun.names == ["a", "b", "c"]
    assert queue.waiting == 1
    time.pass_s(0.11)
    assert begun.names == ["a", "b", "c", "d"]
    assert (queue.waiting, time.timers) == (0, 0)
    time.pass_s(60)
    for name in ("e", "f", "g", "h"):
        queue.enter(A, begun(name))
    assert begun.names[4:] == ["e", "f", "g"]


def test_no_more_begin_in_a_second_than_the_rate() -> None:
    queue, time, begun = made(rate=200.0, burst=4)
    for number in range(1000):
        queue.enter(A, begun(str(number)))
    time.pass_s(1.0)
    assert 200 <= len(begun.names) <= 205
    assert begun.names == [str(number) for number in range(len(begun.names))]


def test_flood_of_one_peer_delays_another_by_one_handshake() -> None:
    queue, time, begun = made()
    for number in range(1000):
        queue.enter(A, begun(f"flood {number}"))
    queue.enter(B, begun("good"))
    time.pass_s(0.25)
    assert begun.names == ["flood 0", "flood 1", "good"]


def test_peers_take_turns() -> None:
    queue, time, begun = made()
    for peer, names in ((A, "abc"), (B, "de"), (C, "f")):
        for name in names:
            queue.enter(peer, begun(name))
    time.pass_s(10)
    assert "".join(begun.names) == "abdfce"


def test_connection_that_ended_meanwhile_uses_no_turn() -> None:
    queue, time, begun = made()
    queue.enter(A, begun("a"))
    for _ in range(100):
        queue.enter(A, begun("gone", open_=False))
    queue.enter(A, begun("b"))
    time.pass_s(0.11)
    assert begun.names == ["a", "b"]
    assert (queue.waiting, time.timers) == (0, 0)


def test_one_timer_however_many_wait() -> None:
    queue, time, begun = made()
    for number in range(100):
        queue.enter(f"127.0.1.{number}", begun(str(number)))
        assert time.timers <= 1
    time.pass_s(5.0)
    assert time.timers == 1
