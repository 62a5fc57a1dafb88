"""``handrail-kept``, run as a container's first process.

The program that it keeps going may end in any way; the container does not end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.manifests import DEPLOY

KEPT = DEPLOY / "docker/handrail-kept"
WITHIN_S = 120.0


@contextmanager
def kept(folder: Path, handrail: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``handrail-kept`` with a stub of ``handrail`` that records each start.

    The stub writes a line to ``starts`` whenever it begins, then runs the given shell text.
    """
    program = folder / "bin/handrail"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/starts\n{handrail}\n', encoding="utf-8")
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HANDRAIL_KEPT_PAUSE": "0"}
    process = subprocess.Popen([str(KEPT), "sidecar", "--role=decode", "a b"], env=env, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WITHIN_S)


def starts(folder: Path) -> list[str]:
    file = folder / "starts"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def wait_until(report: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not report():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["exit 2", "kill -9 $$"], ids=["a wrong configuration", "killed"])
def test_what_ends_begins_anew_with_the_same_arguments_and_the_container_stays(end: str, tmp_path: Path) -> None:
    with kept(tmp_path, end) as process:
        wait_until(lambda: len(starts(tmp_path)) >= 3)
        assert process.poll() is None
    assert set(starts(tmp_path)) == {"sidecar --role=decode a b"}


def test_sigterm_ends_it_after_the_sidecar_has_drained(tmp_path: Path) -> None:
    drained = (
        f"trap 'sleep 0.5; echo drained > {tmp_path}/drained; exit 0' TERM\ntouch {tmp_path}/up\nwhile :; do sleep 0.1; done"
    )
    with kept(tmp_path, drained) as process:
        wait_until((tmp_path / "up").exists)
        process.terminate()
        assert process.wait(WITHIN_S) == 0
        assert (tmp_path / "drained").exists()
    assert len(starts(tmp_path)) == 1


def test_sigterm_ends_it_between_two_starts_too(tmp_path: Path) -> None:
    with kept(tmp_path, "exit 1") as process:
        wait_until(lambda: len(starts(tmp_path)) >= 1)
        process.terminate()
        process.wait(WITHIN_S)
