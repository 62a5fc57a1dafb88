"""Run one child process of the test bed.

It starts in a group of its own, its output goes to a file, and it ends with everything it started.
Standard library only, since ``handrail demo --engine vllm`` uses it too.
Linux: a child requests SIGTERM for when its parent dies, so that a killed test run leaves no engine behind. The kernel sends
that when the starting *thread* ends: start children from a thread that outlives them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before any fork: loading it in the child of a threaded parent can block for ever
_POLL_S = 0.05
# Below the kernel's range for outgoing connections, so that no other process gets the port meanwhile.
_PORTS = range(20000, 32000)
_taken: set[int] = set()


class ChildError(RuntimeError):
    """A child ended, or did not become ready in time.

    The message has the end of its output.
    """


def free_port() -> int:
    """Return a free port of 127.0.0.1 that this process has not returned before.

    It was free a moment ago.
    """
    for port in random.sample(_PORTS, k=200):
        if port in _taken:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            _taken.add(port)
            return port
    raise OSError(f"no free port found between {_PORTS.start} and {_PORTS.stop}")


def _prepare() -> None:
    """Prepare the child between fork and exec."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A running process; leaving the context stops it."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start ``command``; ``env`` is added to the environment.

        Both stdout and stderr go to ``log``. Raises ``OSError``.
        """
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_prepare,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Return the exit status: None while it runs, negative for the ending signal."""
        return self._process.poll()

    def output(self, lines: int = 30) -> str:
        """Return the last ``lines`` lines of its output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def wait_http(self, url: str, *, deadline_s: float) -> None:
        """Return when ``url`` answers 200; ``deadline_s`` is on the monotonic clock.

        Raises ``ChildError``.
        """

        def answers() -> bool:
            with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
            return False

        self._wait(answers, f"{url} did not answer 200", deadline_s)

    def wait_ready_file(self, path: Path, *, deadline_s: float) -> dict[str, str]:
        """Return the ``addresses`` from the JSON of the ready file.

        A part of Handrail writes that file when it is ready. Raises ``ChildError``.
        """
        self._wait(path.exists, f"{path.name} was not written", deadline_s)
        addresses = json.loads(path.read_text())["addresses"]
        return {str(name): str(address) for name, address in addresses.items()}

    def wait_end(self, *, deadline_s: float) -> int:
        """Return its exit status once it ended by itself.

        Raises ``ChildError`` when the time is over.
        """
        try:
            return self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self.name} did not end in time:\n{self.output()}") from None

    def _wait(self, ready: Callable[[], bool], what: str, deadline_s: float) -> None:
        while not ready():
            if self.exit_status is not None:
                raise ChildError(f"{self.name} ended with status {self.exit_status} before it was ready:\n{self.output()}")
            if time.monotonic() > deadline_s:
                raise ChildError(f"{self.name}: {what} in time:\n{self.output()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)

    def stop(self, grace_s: float = 20.0) -> int:
        """Send SIGTERM, then SIGKILL after ``grace_s``; return the exit status.

        What is left of its group then gets SIGKILL.
        """
        if self.exit_status is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return status

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
