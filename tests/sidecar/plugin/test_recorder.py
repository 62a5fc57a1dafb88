"""The recorder: bounded, with one thread, and patient with an absent sidecar."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from handrail.plugin import events as words
from handrail.plugin import logs
from handrail.plugin.guard import FAILURES_ALLOWED, HookGuard
from handrail.plugin.recorder import Recorder
from handrail_sidecar.sources.datagram import Packet, read_packet


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
        bound.settimeout(60)
        yield bound


def received(listener: socket.socket) -> Packet:
    return read_packet(listener.recv(70_000))


def test_what_is_recorded_arrives_with_boot_and_clock(path: Path, listener: socket.socket) -> None:
    recorder = Recorder(str(path), clock=lambda: 11, wall=lambda: 22)
    recorder.record((words.FIRST_TOKEN, 5, "r"))
    assert recorder.flush()
    packet = received(listener)
    assert [(e.name, e.at_ns, e.fields["request"]) for e in packet.events] == [("first_token", 5, "r")]
    assert (packet.boot, packet.sequence, packet.monotonic_ns, packet.unix_ns) == (recorder.boot, 1, 11, 22)
    recorder.stop()


def test_nobody_listens_then_somebody_does(path: Path) -> None:
    recorder = Recorder(str(path))
    for n in range(5):
        recorder.record((words.FIRST_TOKEN, n, "r"))
    assert not recorder.flush()
    recorder.record((words.FIRST_TOKEN, 5, "r"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
        bound.settimeout(60)
        assert recorder.flush()
        first, second = received(bound), received(bound)
    assert [e.at_ns for e in (*first.events, *second.events)] == [0, 1, 2, 3, 4, 5]
    assert (first.sequence, second.sequence, second.lost) == (1, 2, 0)
    recorder.stop()


def test_a_restarted_sidecar_is_found_again(path: Path) -> None:
    recorder = Recorder(str(path))
    for n in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.bind(str(path))
            bound.settimeout(60)
            recorder.record((words.FIRST_TOKEN, n, "r"))
            assert recorder.flush()
            assert received(bound).events[0].at_ns == n
        path.unlink()
    recorder.stop()


def test_a_full_socket_does_not_block_and_loses_nothing(path: Path, listener: socket.socket) -> None:
    recorder = Recorder(str(path))
    sent = 0
    while sent < 100_000:
        recorder.record((words.LOG, sent, "ERROR", "x" * 4000))
        sent += 1
        if not recorder.flush():
            break
    else:
        pytest.fail("the socket takes everything: not the case under test")
    seen = 0
    while seen < sent:
        seen += len(received(listener).events)
        recorder.flush()
    assert (seen, recorder.lost) == (sent, 0)
    recorder.stop()


def test_the_oldest_are_given_up_and_counted(path: Path, listener: socket.socket) -> None:
    recorder = Recorder(str(path), max_events=10)
    for n in range(25):
        recorder.record((words.FIRST_TOKEN, n, "r"))
    assert recorder.flush()
    packet = received(listener)
    assert ([e.at_ns for e in packet.events], packet.lost) == (list(range(15, 25)), 15)
    recorder.stop()


def test_one_thread_a_process_that_ends(path: Path, listener: socket.socket) -> None:
    before = set(threading.enumerate())
    recorder = Recorder(str(path))
    recorder.record((words.FIRST_TOKEN, 1, "r"))
    recorder.start(words.CORE)
    recorder.start(words.WORKER)
    (own,) = set(threading.enumerate()) - before
    packet = received(listener)
    assert packet.kind == words.CORE
    assert [event.name for event in packet.events if event.name != words.PAUSED] == [words.FIRST_TOKEN]
    recorder.stop()
    assert not own.is_alive()


def test_facts_are_sent_first_and_to_a_sidecar_that_comes_later(path: Path) -> None:
    recorder = Recorder(str(path))
    recorder.say({"model": "m"})
    recorder.say({"dtype": "bfloat16"})
    recorder.record((words.FIRST_TOKEN, 1, "r"))
    assert not recorder.flush()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
        bound.settimeout(60)
        assert recorder.flush()
        facts, token = received(bound).events
    assert facts.fields["facts"] == {"model": "m", "dtype": "bfloat16"}
    assert token.name == words.FIRST_TOKEN
    recorder.stop()


def test_a_sidecar_that_restarts_between_two_flushes_gets_the_facts_too(path: Path) -> None:
    recorder = Recorder(str(path))
    recorder.say({"model": "m"})
    for n in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.bind(str(path))
            bound.settimeout(60)
            for at in range(2):
                recorder.record((words.FIRST_TOKEN, at, "r"))
                assert recorder.flush()
            assert [[e.name for e in received(bound).events] for _ in range(2)] == [["facts", "first_token"], ["first_token"]], n
        path.unlink()
    recorder.stop()


def test_an_error_line_of_a_process_without_a_thread_goes_at_once(path: Path, listener: socket.socket) -> None:
    recorder = Recorder(str(path))
    recorder.say_line("WARNING", "kept for later", at_once=False)
    recorder.say_line("ERROR", "it dies", at_once=True)
    assert [e.fields["line"] for e in received(listener).events] == ["kept for later", "it dies"]
    assert not recorder.running
    recorder.stop()


def test_a_handler_that_the_engine_has_dropped_is_put_back(path: Path, listener: socket.socket) -> None:
    """vLLM's API server configures its logging after it has loaded its plugins."""
    logger = logging.getLogger("vllm")
    recorder = Recorder(str(path))
    recorder.each_second = lambda: logs.listen(recorder)
    logs.listen(recorder)
    try:
        logger.handlers.clear()
        recorder.start(words.API)
        while not any(isinstance(each, logs.GuestHandler) for each in logger.handlers):
            received(listener)  # what it sends while it lives; the socket's timeout ends a wait for nothing
    finally:
        recorder.stop()
        logger.handlers.clear()


def test_the_last_word_of_a_process_goes_at_once_and_once(path: Path, listener: socket.socket) -> None:
    now = iter(range(0, 100 * 10**9, 10**9))
    recorder = Recorder(str(path), clock=lambda: next(now))
    recorder.fault_logged()
    for _ in range(32):
        recorder.record((words.FIRST_TOKEN, next(now), "r"))
    recorder.say_stopping()  # long after: a request's error at that time is not why it ends
    recorder.say_stopping()
    events = received(listener).events
    assert [(e.name, e.fields["clean"]) for e in events if e.name == words.STOPPING] == [(words.STOPPING, True)]
    recorder.stop()


def test_a_last_word_that_nobody_hears_holds_up_nothing(path: Path) -> None:
    recorder = Recorder(str(path))
    recorder.say_stopping()
    recorder.stop()


def test_fifty_recorders_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    fds, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for n in range(50):
        recorder = Recorder(str(tmp_path / f"{n}.sock"))
        recorder.record((words.FIRST_TOKEN, 1, "r"))
        recorder.start(words.CORE)
        recorder.stop()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == (fds, threads)


def test_the_guard_keeps_failures_in_counts_them_and_takes_the_hook_off(path: Path) -> None:
    recorder = Recorder(str(path))
    guard = HookGuard(recorder)
    calls = []

    def fails(value: int) -> None:
        calls.append(value)
        raise RuntimeError("a bug of ours")

    for n in range(FAILURES_ALLOWED + 3):
        assert guard("hook", fails, n) is None
    assert guard("another", lambda: 7) == 7
    assert len(calls) == FAILURES_ALLOWED
    statements = list(recorder._events)
    assert [event[0] for event in statements] == [words.DEGRADED] * FAILURES_ALLOWED
    assert [event[4] for event in statements] == [False] * (FAILURES_ALLOWED - 1) + [True]
    recorder.stop()
