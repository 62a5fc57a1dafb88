"""Pauses of a process: what the kernel's files say, late wake-ups and why, the garbage collector, a process that is stopped."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import handrail.guest.pauses as pauses
from handrail.guest import events as words
from handrail.guest.pauses import GC, HELD, QUEUED, SLEEP_S, THROTTLED, PauseWatch
from handrail.sources.datagram import Heard, read_packet

MS = 1_000_000
SLEEP_NS = round(SLEEP_S * 1e9)


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets what the two files say: waited for a processor, quota used up; both ns."""
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
    said: list[Any] = []
    clock = Clock()
    watch = PauseWatch(said.append, clock)
    watch.begin()
    clock.now = 19 * MS
    kernel(19 * MS, 19 * MS)
    watch.woke(0)  # late, but not worth telling; what was waited until now says nothing of later
    kernel((19 + waited_ms) * MS, (19 + throttled_ms) * MS)
    clock.now = 200 * MS
    watch.woke(100 * MS)
    watch.end()
    assert said == [(words.PAUSED, 200 * MS, 100 * MS, reason, SLEEP_NS)]


def test_without_the_kernels_files_it_is_told_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_opened", lambda path: None)
    said: list[Any] = []
    clock = Clock()
    watch = PauseWatch(said.append, clock)
    watch.begin()
    clock.now = 50 * MS
    watch.woke(0)
    watch.end()
    assert [event[3] for event in said] == [HELD]


@given(st.binary(max_size=200))
def test_whatever_the_files_hold_is_a_number(content: bytes) -> None:
    assert pauses._waited(content) >= 0
    assert pauses._throttled(content) >= 0


def test_both_versions_of_cgroups_are_read() -> None:
    assert pauses._throttled(b"nr_throttled 1\nthrottled_usec 25\n") == 25_000
    assert pauses._throttled(b"nr_periods 1\nnr_throttled 1\nthrottled_time 25\n") == 25
    assert pauses._throttled(b"usage_usec 25\n") == 0


def test_a_long_pass_of_the_collector_is_a_pause_and_a_short_one_is_not() -> None:
    said: list[Any] = []
    clock = Clock()
    watch = PauseWatch(said.append, clock)
    watch.watch_collector()
    try:
        gc.collect()
        assert said == []

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
    assert said == [(words.PAUSED, 30 * MS, 0, GC, 0)]
    gc.collect()
    assert len(said) == 1


CHILD = """
import sys, time
sys.path.insert(0, {root!r})
from handrail.guest.recorder import Recorder
recorder = Recorder({path!r})
recorder.start("core")
print("ready", flush=True)
sys.stdin.readline()
recorder.stop()
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "engine.sock"))
        bound.settimeout(20)
        yield bound


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process is stopped by SIGSTOP")
def test_a_process_that_is_stopped_says_so_when_it_goes_on(tmp_path: Path, listener: socket.socket) -> None:
    root = str(Path(pauses.__file__).parents[2])
    code = CHILD.format(root=root, path=str(tmp_path / "engine.sock"))
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            read_packet(listener.recv(70_000))  # its thread lives
            begin_ns = time.monotonic_ns()
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.4)  # for how long it stands
            end_ns = time.monotonic_ns()
            os.kill(child.pid, signal.SIGCONT)
            found: list[Heard] = []
            while not found:
                packet = read_packet(listener.recv(70_000))
                found = [e for e in packet.events if e.name == words.PAUSED and e.at_ns >= end_ns]
        finally:
            os.kill(child.pid, signal.SIGCONT)
            child.communicate("\n", timeout=20)
    (pause,) = found
    assert pause.fields["begin_ns"] <= begin_ns + 2 * SLEEP_NS + 50 * MS
    assert pause.at_ns - pause.fields["begin_ns"] >= 300 * MS
