"""Start and end the child processes of a command.

Each child is ended by its own pid, in a given order. Its output is kept in a file.

A child gets its own session, so that Ctrl-C at the terminal reaches the command alone, which then ends its children in order.
On Linux, the kernel ends a child whose command was killed.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
POLL_S: Final = 0.05
_TAIL_LINES: Final = 15
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: loading it after a fork may hang
# Below the kernel's range for outgoing connections, so that none of those takes a port before its process does.
_PORTS: Final = range(20_000, 32_000)


class ChildError(Exception):
    """A child ended, or did not become ready in time.

    The message ends with the child's last lines of output.
    """


class Child:
    """One process; it runs from construction on.

    Raises ``OSError`` when it cannot be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None, may_end: bool = False
    ) -> None:
        self.name = name
        self.may_end = may_end  # with status 0, by itself
        self.log = folder / f"{name}.log"
        self.ready_file = folder / f"{name}.ready.json"
        self.addresses: dict[str, str] = {}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_ask_to_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        self.may_end = True
        if self.poll() is None:
            self._process.terminate()

    def join(self, timeout_s: float) -> None:
        """Wait for the end; after ``timeout_s`` force it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def read_ready(self) -> bool:
        """Return whether it reported that it is ready; fill ``addresses``."""
        if not self.addresses and self.ready_file.exists():
            self.addresses = json.loads(self.ready_file.read_text(encoding="utf-8"))["addresses"]
        return bool(self.addresses)

    def tail(self) -> str:
        """Return its last lines of output, indented."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            return "\n".join(f"  | {line}" for line in lines)
        return ""


def _ask_to_end_with_parent() -> None:
    """Ask the kernel to end this child with its parent.

    It runs in the child between fork and exec.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Children:
    """All children of one command, in their order of start; ``end`` ends them.

    ``asked_to_end``: raises when the command has to end; every check of the children calls it.
    """

    def __init__(self, folder: Path, requested_to_end: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self._stop_requested = requested_to_end
        self._all: list[Child] = []

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, *, may_end: bool = False) -> Child:
        """Start a child.

        ``may_end``: an end with status 0 is no failure. Raises ``OSError``.
        """
        child = Child(name, command, folder=self.folder, env=env, may_end=may_end)
        self._all.append(child)
        return child

    def ready_file(self, name: str) -> Path:
        """Return the file in which the child of this name reports that it is ready."""
        return self.folder / f"{name}.ready.json"

    def check(self) -> None:
        """Check that every child that should run does run.

        Raises ``ChildError`` if one has ended, and what ``asked_to_end`` raises.
        """
        self._stop_requested()
        for child in self._all:
            status = child.poll()
            if status is not None and (status != 0 or not child.may_end):
                raise ChildError(f"{child.name} ended with status {status}; its output ({child.log}):\n{child.tail()}")

    def wait_for(self, what: str, holds: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> None:
        """Return as soon as ``holds()``.

        Raises ``ChildError`` when a child ends first or the time is up.
        """
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            self.check()
            if time.monotonic() > deadline_s:
                raise ChildError(f"{what}: not within {timeout_s:g} s")
            time.sleep(poll_s)

    def wait_ready(self, children: Sequence[Child], timeout_s: float) -> None:
        """Wait until all have written their ready files."""
        names = ", ".join(child.name for child in children)
        self.wait_for(f"{names} did not start", lambda: all(child.read_ready() for child in children), timeout_s)

    def end(self, groups: Sequence[Sequence[Child]], grace_s: float) -> None:
        """End group after group, the members of one group at the same time.

        After that, end the children that are left, the last started first.
        """
        rest = [[child] for child in reversed(self._all)]
        for group in [*groups, *rest]:
            for child in group:
                child.terminate()
            for child in group:
                child.join(grace_s)


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports of ``HOST`` that no process listens on now.

    Raises ``OSError`` when there are fewer.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, k=min(200 + count, len(_PORTS))):
        if len(found) == count:
            return found
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    raise OSError(f"fewer than {count} free ports found between {_PORTS.start} and {_PORTS.stop}")
