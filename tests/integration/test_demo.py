"""``handrail demo`` as a user runs it: emulated fleet, sidecars, collector.

Nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1200)

DEMO = (sys.executable, "-m", "handrail_cli.main", "demo")
DEADLINE_S = 380.0


def pids(folder: Path) -> dict[str, int]:
    """Return the process ids of the children that had become ready."""
    return {path.name: json.loads(path.read_text())["pid"] for path in folder.glob("*.ready.json")}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_once_as_json(tmp_path: Path) -> None:
    result = demo("--once", "--json", "--requests", "24", "--concurrency", "6", "--keep", str(tmp_path / "work"))
    assert result.returncode == 0, result.stderr
    fields: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert (fields["requests"], fields["answered"], fields["joined"], fields["wrong"], fields["coverage"]) == (24, 24, 24, 0, 1.0)
    assert fields["ttft_p50_ms"] > 20  # a step of P and one of D take 10 ms each, and the prompt takes longer
    assert fields["ttft_p99_ms"] >= fields["ttft_p50_ms"]
    assert 0 <= fields["ttft_difference_p50_ms"] < fields["ttft_p50_ms"]  # the client's own time lies around the edge's
    assert fields["phases_p50_ms"]["prefill_compute"] > 10
    assert "faults" not in fields
    assert 0 <= fields["unattributed_share"] < 1
    started = pids(tmp_path / "work")
    assert len(started) == 11  # collector, edge, router, and twice two engines with their sidecars
    assert not [name for name, pid in started.items() if alive(pid)]


@pytest.mark.eval
def test_a_fault_is_shown_as_handrail_reports_it_and_as_it_was() -> None:
    faults = ("--fault", "slow_link:p0>d0:40", "--fault", "fetch_failed:p1>d1:1")
    result = demo("--once", "--json", "--requests", "16", "--concurrency", "4", *faults)
    assert result.returncode == 0, result.stderr
    fields: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert (fields["joined"], fields["wrong"]) == (16, 0)
    slow, failed = fields["faults"]
    assert (slow["fault"], failed["fault"]) == (faults[1], faults[3])
    assert slow["requests"] == slow["true_fetches"]["ok"] > 0
    assert failed["requests"] == failed["true_fetches"]["failed"] == 16 - fields["answered"] > 0
    moved_ms = 50 * 131_072 / (12.5e9 / 40) * 1e3  # fifty words at the least
    assert slow["true_p50_ms"]["kv_transfer"] >= moved_ms
    hidden = sum(slow["true_p50_ms"][name] for name in ("kv_wait", "kv_transfer", "kv_notice"))
    assert slow["phases_p50_ms"]["unattributed"] >= 0.5 * hidden  # without the plugin all of it is one phase


def test_the_waterfall_and_what_to_try_next(tmp_path: Path) -> None:
    work = tmp_path / "work"
    shown = subprocess.Popen(
        [*DEMO, "--requests", "6", "--keep", str(work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert shown.stdout is not None
        lines: list[str] = []
        for line in shown.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        text = "".join(lines)
        assert "The slowest of 6 requests" in text
        assert "prefill_compute" in text
        assert "6 of 6" in text
        api = next(word for word in text.split() if word.startswith("http://"))
        listed = [sys.executable, "-m", "handrail_cli.main", "requests", "--api", api, "--json"]
        rows = subprocess.run(listed, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.splitlines()
        assert len(rows) == 6
        started = pids(work)
        shown.send_signal(signal.SIGINT)
        assert shown.wait(DEADLINE_S) == 0
    finally:
        shown.kill()
        shown.communicate()
    assert not [name for name, pid in started.items() if alive(pid)]


def starting(work: Path, **streams: Any) -> subprocess.Popen[str]:
    """Start a demo whose collector is ready while its other children still start."""
    running = subprocess.Popen([*DEMO, "--keep", str(work)], text=True, **streams)
    deadline_s = time.monotonic() + DEADLINE_S
    while not (work / "sidecar-decode-2.log").exists():
        assert running.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return running


def session_members(work: Path) -> list[int]:
    """Return the demo's living processes.

    Their command lines name the work folder.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if any(str(work).encode() in part for part in command) and b"demo" not in command:
                found.append(int(folder.name))
    return found


def test_sigterm_while_starting_ends_every_child(tmp_path: Path) -> None:
    work = tmp_path / "work"
    running = starting(work)
    try:
        assert len(session_members(work)) >= 4  # the last one may not have started yet
        running.terminate()
        assert running.wait(DEADLINE_S) == 128 + signal.SIGTERM
    finally:
        running.kill()
        running.wait()
    assert not session_members(work)


def test_a_child_that_dies_is_shown_with_its_output(tmp_path: Path) -> None:
    work = tmp_path / "work"
    running = starting(work, stderr=subprocess.PIPE)
    try:
        os.kill(pids(work)["collector.ready.json"], signal.SIGKILL)
        _, errors = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1
    assert "collector ended with status -9" in errors
    assert "| " in errors
    assert str(work) in errors
    assert not session_members(work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "8b-h100-balanced-constnt"], "nearest: 8b-h100-balanced-constant"),
        (["--requests", "0"], "not between 1 and 10000"),
        (["--engine", "sglang"], "invalid choice"),
        (["--fault", "slow_lnk:p0>d0:2"], "nearest: slow_link"),
        (["--fault", "slow_link:p0>d7:2"], "valid: *, p0>d0"),
        (["--fault", "clock_offset:edge:1"], "keep this machine's clock"),
        (["--fault", "slow_link:p0>d0:2", "--engine", "vllm"], "emulated engines"),
    ],
    ids=["profile", "count", "engine", "fault", "place", "edge's clock", "vllm"],
)
def test_mistakes_end_before_anything_starts(arguments: list[str], message: str) -> None:
    result = demo(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_full_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = demo("--keep", str(tmp_path))
    assert result.returncode == 2
    assert "not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
