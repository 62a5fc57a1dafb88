"""Send an emulated engine's plugin events to the socket of ``HANDRAIL_SOCKET``.

They are JSON datagrams in the form of ``handrail.plugin.events``. The form is written a second time here, since the emulator must
not share code with what it tests; tests compare the two.
Without the variable nothing is sent. The sender never waits: what the socket does not take is counted as lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SOCKET_ENV = "HANDRAIL_SOCKET"
FLUSH_S = 0.05
ALIVE_EVERY_S = 1.0
_MOST_BYTES = 24 * 1024  # bytes of events in one datagram; the form allows 32 KiB in all
_MOST_WAITING = 20_000  # events; the oldest are dropped first

Facts = Mapping[str, str | int | bool]


class Voice:
    """The sender of one engine process's events.

    ``facts``: what the process is. ``unfinished``: returns how many requests it has to do.
    ``watch``: called with the monotonic time before each send, to report what has happened since the last one.
    """

    def __init__(
        self, path: Path, facts: Facts, unfinished: Callable[[], int], watch: Callable[[int], None] = lambda _: None
    ) -> None:
        self.lost = 0
        self._path = path
        self._facts = facts
        self._unfinished = unfinished
        self._watch = watch
        self._boot = secrets.token_hex(8)
        self._sequence = 0
        self._step_ns: int | None = None
        self._events: list[str] = []
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Report the end of the process, then stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.say("stopping", True)
        self.end()

    def end(self) -> None:
        """Send what is left, and close the socket."""
        self._flush()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def say(self, name: str, *fields: Any, at_ns: int | None = None) -> None:
        """Queue one event.

        ``fields`` are in the order of the form. ``at_ns``: monotonic; None is now.
        """
        if len(self._events) >= _MOST_WAITING:
            del self._events[0]
            self.lost += 1
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        if name == "step":
            self._step_ns = at_ns
        self._events.append(json.dumps((name, at_ns, *fields), separators=(",", ":")))

    async def _run(self) -> None:
        self.say("facts", self._facts)
        alive_at = 0.0
        while True:
            if time.monotonic() >= alive_at:
                alive_at = time.monotonic() + ALIVE_EVERY_S
                self.say("alive", self._step_ns, self._unfinished())
            self._watch(time.monotonic_ns())
            self._flush()
            await asyncio.sleep(FLUSH_S)

    def _flush(self) -> None:
        waiting, self._events = self._events, []
        while waiting:
            taken = size = 0
            while taken < len(waiting) and size + len(waiting[taken]) < _MOST_BYTES:
                size += len(waiting[taken]) + 1
                taken += 1
            taken = max(taken, 1)
            self._sequence += 1
            head = [1, self._boot, os.getpid(), "core", self._sequence, time.monotonic_ns(), time.time_ns(), self.lost]
            if not self._send(f"{json.dumps(head)[:-1]},[{','.join(waiting[:taken])}]]".encode()):
                self.lost += taken
            waiting = waiting[taken:]

    def _send(self, datagram: bytes) -> bool:
        """Send one datagram.

        The path is looked up each time, since the sidecar may not be there yet or may have restarted.
        """
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        try:
            self._socket.sendto(datagram, str(self._path))
        except OSError:
            return False
        return True


class SaidLines(logging.Handler):
    """A log handler that sends the engine's own warnings.

    The plugin has the same handler on the ``vllm`` logger.
    """

    def __init__(self, voice: Voice) -> None:
        super().__init__(logging.WARNING)
        self._voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        self._voice.say("log", record.levelname, record.getMessage()[:4096])


def voice_path() -> Path | None:
    """Return where the sidecar listens, from the engine's environment."""
    given = os.environ.get(SOCKET_ENV)
    return Path(given) if given else None
