"""Pauses of a process, from the kernel's files, late wake-ups and their reasons.

The tests also cover the garbage collector, and a process that is stopped.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import handrail.plugin.pauses as pauses
from handrail.plugin import events as words
from handrail.plugin.pauses import GC, HELD, QUEUED, SLEEP_S, THROTTLED, PauseWatch
from handrail_sidecar.sources.datagram import PluginDatagramEvent, read_packet
from harness.skips import needs_ability

MS = 1_000_000
SLEEP_NS = round(SLEEP_S * 1e9)


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Set the two kernel files: time waited for a processor and quota used up, in ns."""
    waits, quota = tmp_path / "schedstat", tmp_path / "cpu.stat"

    def says(waited_ns: int, throttled_ns: int) -> None:
        waits.write_text(f"5000000 {waited_ns} 77\n")
        quota.write_text(f"usage_usec 1\nnr_periods 9\nnr_throttled 3\nthrottled_usec {throttled_ns // 1000}\n")

    says(0, 0)
    opened = pauses._opened
    monkeypatch.setattr(pauses, "_opened", lambda path: opened(str(waits) if "schedstat" in path else path))
    monkeypatch.setattr(pauses, "_quota_path", lambda: str(quota))
    return says


@pytest.mark.parametrize(
    ("waited_ms", "throttled_ms", "reason"),
    [
        pytest.param(0, 0, HELD, id="neither"),
        pytest.param(90, 0, QUEUED, id="no-processor"),
        pytest.param(90, 80, THROTTLED, id="no-quota"),
        pytest.param(0, 80, THROTTLED, id="no-quota-and-not-queued"),
        pytest.param(20, 20, HELD, id="too-little-of-both"),
    ],
)
def test_a_late_wake_up_is_a_pause(kernel: Callable[[int, int], None], waited_ms: int, throttled_ms: int, reason: str) -> None:
    statements: list[Any] = []
    clock = Clock()
    watch = PauseWatch(statements.append, clock)
    watch.begin()
    clock.now = 19 * MS
    kernel(19 * MS, 19 * MS)
    watch.woke(0)  # late, but below the threshold; time waited until now proves nothing about later
    kernel((19 + waited_ms) * MS, (19 + throttled_ms) * MS)
    clock.now = 200 * MS
    watch.woke(100 * MS)
    watch.end()
    assert statements == [(words.PAUSED, 200 * MS, 100 * MS, reason, SLEEP_NS)]


@pytest.mark.parametrize(
    ("late_ms", "throttled_ms", "lasted_ms"),
    [
        pytest.param(0, 60, 60, id="between-two-wake-ups"),
        pytest.param(30, 80, 80, id="begun-before-the-wake-up-was-due"),
        pytest.param(50, 40, 50, id="late-for-longer"),
        pytest.param(10, 900, 110, id="several-processors"),
    ],
)
def test_a_quota_that_is_used_up_while_the_thread_sleeps_is_a_pause_too(
    kernel: Callable[[int, int], None], late_ms: int, throttled_ms: int, lasted_ms: int
) -> None:
    statements: list[Any] = []
    clock = Clock()
    watch = PauseWatch(statements.append, clock)
    watch.begin()
    kernel(0, throttled_ms * MS)
    clock.now = (200 + late_ms) * MS
    watch.woke(200 * MS)
    watch.end()
    bound = SLEEP_NS + late_ms * MS - lasted_ms * MS
    assert statements == [(words.PAUSED, clock.now, clock.now - lasted_ms * MS, THROTTLED, bound)]


def test_without_the_kernels_files_a_pause_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_opened", lambda path: None)
    statements: list[Any] = []
    clock = Clock()
    watch = PauseWatch(statements.append, clock)
    watch.begin()
    clock.now = 50 * MS
    watch.woke(0)
    watch.end()
    assert [event[3] for event in statements] == [HELD]


@given(st.binary(max_size=200))
def test_whatever_the_files_hold_is_a_number(content: bytes) -> None:
    assert pauses._waited(content) >= 0
    assert pauses._throttled(content) >= 0


def test_both_versions_of_cgroups_are_read() -> None:
    assert pauses._throttled(b"nr_throttled 1\nthrottled_usec 25\n") == 25_000
    assert pauses._throttled(b"nr_periods 1\nnr_throttled 1\nthrottled_time 25\n") == 25
    assert pauses._throttled(b"usage_usec 25\n") == 0


def test_a_long_pass_of_the_collector_is_a_pause_and_a_short_one_is_not() -> None:
    statements: list[Any] = []
    clock = Clock()
    watch = PauseWatch(statements.append, clock)
    watch.watch_collector()
    try:
        gc.collect()
        assert statements == []

        def slow(phase: str, info: object) -> None:
            clock.now += 30 * MS if phase == "start" else 0

        gc.callbacks.append(slow)  # after ours, so its time lies within the pass
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(slow)
    finally:
        watch.unwatch_collector()
        watch.unwatch_collector()
    assert statements == [(words.PAUSED, 30 * MS, 0, GC, 0)]
    gc.collect()
    assert len(statements) == 1


CHILD = """
import mmap, struct, sys
sys.path.insert(0, {root!r})
from handrail.plugin.recorder import Recorder
with open({clock!r}, "r+b") as file:
    told = mmap.mmap(file.fileno(), 8)
recorder = Recorder({path!r}, clock=lambda: struct.unpack("=q", told[:8])[0])
recorder.start("core")
print("ready", flush=True)
sys.stdin.readline()
recorder.stop()
"""


class SharedClock:
    """A clock that another process reads; it stands still until it is set."""

    def __init__(self, path: Path, now_ns: int) -> None:
        path.write_bytes(struct.pack("=q", now_ns))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)
        self.now_ns = now_ns

    def pass_by(self, span_ns: int) -> None:
        self.now_ns += span_ns
        self._shared[:8] = struct.pack("=q", self.now_ns)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "engine.sock"))
        bound.settimeout(60)
        yield bound


def stopped_for(child: subprocess.Popen[str], clock: SharedClock, span_ns: int) -> None:
    """Stop the child while so much time passes."""
    os.kill(child.pid, signal.SIGSTOP)
    try:
        state = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state is not None
        assert state.si_code == os.CLD_STOPPED
        clock.pass_by(span_ns)
    finally:
        os.kill(child.pid, signal.SIGCONT)


def receive_until(listener: socket.socket, now_ns: int) -> list[PluginDatagramEvent]:
    """Return the events until the child reports that it lives at ``now_ns``."""
    plugin_datagram_events: list[PluginDatagramEvent] = []
    while not any(event.name == words.ALIVE and event.at_ns >= now_ns for event in plugin_datagram_events):
        plugin_datagram_events += read_packet(listener.recv(70_000)).events
    return plugin_datagram_events


@needs_ability(hasattr(signal, "SIGSTOP"), "SIGSTOP, which stops a process")
def test_a_process_that_is_stopped_says_so_when_it_goes_on(tmp_path: Path, listener: socket.socket) -> None:
    root = str(Path(pauses.__file__).parents[2])
    clock = SharedClock(tmp_path / "clock", 10**12)
    code = CHILD.format(root=root, path=str(tmp_path / "engine.sock"), clock=str(tmp_path / "clock"))
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            receive_until(listener, clock.now_ns)  # its thread lives
            found: list[PluginDatagramEvent] = []
            while not found:  # it may be stopped between a wake-up and the request for the next one
                before_ns = clock.now_ns
                stopped_for(child, clock, 400 * MS)
                plugin_datagram_events = receive_until(listener, clock.now_ns)
                found = [e for e in plugin_datagram_events if e.name == words.PAUSED and e.fields["reason"] != GC]
        finally:
            child.communicate("\n", timeout=300)
    (pause,) = found
    assert (pause.fields["begin_ns"], pause.at_ns) == (before_ns + SLEEP_NS, before_ns + 400 * MS)
