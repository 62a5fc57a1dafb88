"""Pauses of real processes.

One process's control group has used up its processor quota; the other is stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from handrail.plugin.pauses import HELD, THROTTLED
from harness.cpu_quota import NoQuotaError, cpu_quota, stopped_in_turns
from harness.skips import skip_unable

# Spins until its input ends, and reports each pause; it reads its control group when a line tells it to begin.
_CHILD = """
import json, sys, threading, time
from handrail.plugin.pauses import SLEEP_S, PauseWatch
sys.stdin.readline()
watch = PauseWatch(lambda event: print(json.dumps([event[3], event[1] - event[2]]), flush=True))
over = threading.Event()
def sleep():
    watch.begin()
    while not over.is_set():
        due_ns = time.monotonic_ns() + round(SLEEP_S * 1e9)
        time.sleep(SLEEP_S)
        watch.woke(due_ns)
thread = threading.Thread(target=sleep)
thread.start()
spin = threading.Thread(target=lambda: [sum(range(500)) for _ in iter(over.is_set, True)])
spin.start()
sys.stdin.readline()
over.set()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Run a child in its own process group; it waits for a line."""
    started = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def wait_for(child: subprocess.Popen[str], reason: str) -> int:
    """Return the length of the next pause for this reason."""
    assert child.stdout is not None
    for line in child.stdout:
        why, lasted_ns = json.loads(line)
        if why == reason:
            return int(lasted_ns)
    raise AssertionError(f"the child ended without a pause for {reason}")


def test_a_used_up_quota_is_reported_as_throttling(child: subprocess.Popen[str]) -> None:
    try:
        with cpu_quota([child.pid], 0.1, name=f"handrail-test-{os.getpid()}"):
            say(child)
            assert wait_for(child, THROTTLED) >= 20_000_000
    except NoQuotaError as error:
        skip_unable(f"a processor quota: {error}")
    say(child)


def test_a_stopped_process_was_held(child: subprocess.Popen[str]) -> None:
    say(child)
    with stopped_in_turns(child.pid, 0.4):
        assert wait_for(child, HELD) >= 20_000_000
    say(child)
