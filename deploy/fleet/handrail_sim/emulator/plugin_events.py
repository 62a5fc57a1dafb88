"""The plugin's events from an emulated engine, sent to ``HANDRAIL_SOCKET``.

They are JSON datagrams in the form of ``handrail.plugin.events``. The form is written a second time here, since the emulator must
not share code with what it tests; tests compare the two.
Without the variable nothing is sent. The sender never waits: what the socket does not take is counted as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from handrail_sim.emulator.core import Ended, EngineCore, EngineJob, FinishReason, LoadStarts, StepEnded
from handrail_sim.emulator.host import WATCH_NS, Hindrance, late_wakes
from handrail_sim.emulator.kv import BLOCK_TOKENS, blocks_for
from handrail_sim.emulator.scenario import Scenario

SOCKET_ENV = "HANDRAIL_SOCKET"
FLUSH_S = 0.05
ALIVE_EVERY_S = 1.0
_MOST_BYTES = 24 * 1024  # bytes of events in one datagram; the form allows 32 KiB in all
_MOST_WAITING = 20_000  # events; the oldest are dropped first

Facts = Mapping[str, str | int | bool]


class EventSender:
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
        self.add("stopping", True)
        self.end()

    def end(self) -> None:
        """Send what is left, and close the socket."""
        self._flush()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def add(self, name: str, *fields: Any, at_ns: int | None = None) -> None:
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
        self.add("facts", self._facts)
        alive_at = 0.0
        while True:
            if time.monotonic() >= alive_at:
                alive_at = time.monotonic() + ALIVE_EVERY_S
                self.add("alive", self._step_ns, self._unfinished())
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


class LogLines(logging.Handler):
    """A log handler that sends the engine's own warnings.

    The plugin has the same handler on the ``vllm`` logger.
    """

    def __init__(self, sender: EventSender) -> None:
        super().__init__(logging.WARNING)
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.add("log", record.levelname, record.getMessage()[:4096])


def socket_path() -> Path | None:
    """Return where the sidecar listens, from the engine's environment."""
    given = os.environ.get(SOCKET_ENV)
    return Path(given) if given else None


_CONNECTOR, _RANK, _MODE, _DIRECTION = "NixlConnector", 0, "pull", "p_to_d"
_STATUS = {
    FinishReason.LENGTH: "FINISHED_LENGTH_CAPPED",
    FinishReason.STOP: "FINISHED_STOPPED",
    FinishReason.ABORT: "FINISHED_ABORTED",
    FinishReason.ERROR: "FINISHED_ERROR",
}
_CONTACT_TAKES_NS = 1_000_000  # less is no first contact: the peer was known


class PluginEvents:
    """The plugin events of one engine. Without ``path`` every call does nothing.

    ``pauses``: the pauses of its process.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        engine_id: str,
        model: str,
        scenario: Scenario,
        lease_ns: int,
        policy: str,
        core: EngineCore,
        pauses: Sequence[Hindrance] = (),
    ) -> None:
        self._engine_id = engine_id
        self._scenario = scenario
        self._lease_ns = lease_ns
        self._core = core
        self._pauses = pauses
        self._watched_ns = time.monotonic_ns()
        self._sent: set[str] = set()  # requests whose scheduling is already reported
        self._lines: logging.Handler | None = None
        self._sender: EventSender | None = None
        if path is not None:
            facts: dict[str, str | int | bool] = {
                "engine_id": engine_id,
                "engine_version": "0.32.0",
                "model": model,
                "connector": _CONNECTOR,
                "connector_role": "kv_both",
                "block_size": BLOCK_TOKENS,
                "block_bytes": BLOCK_TOKENS * scenario.kv_bytes_per_token,
                "kv_blocks": scenario.kv_blocks,
                "tp_size": 1,
                "lease_ns": lease_ns,
                "failure_policy": policy,
            }
            self._sender = EventSender(path, facts, lambda: core.unfinished, self.paused)

    def start(self) -> None:
        if self._sender is not None:
            self._lines = LogLines(self._sender)
            logging.getLogger("handrail_sim.emulator").addHandler(self._lines)
            self._sender.start()

    async def close(self) -> None:
        if self._sender is not None:
            if self._lines is not None:
                logging.getLogger("handrail_sim.emulator").removeHandler(self._lines)
            await self._sender.close()

    def _add(self, name: str, *fields: Any, at_ns: int | None = None) -> None:
        if self._sender is not None:
            self._sender.add(name, *fields, at_ns=at_ns)

    def paused(self, now_ns: int) -> None:
        """Report the late wake-ups of pauses that ended since the last call.

        They are those of a thread of the process: no kernel says why.
        """
        for due_ns, woke_ns in late_wakes(self._pauses, self._watched_ns, now_ns):
            self._add("paused", due_ns, "held", WATCH_NS, at_ns=woke_ns)
        self._watched_ns = now_ns

    # --- requests -------------------------------------------------------------------------------------------------------

    def queued(self, job: EngineJob, at_ns: int, arrival_unix_ns: int, kv: Mapping[str, Any], traceparent: str | None) -> None:
        """Report that a request is queued.

        ``kv``: the hand-off parameters that came with it.
        """
        self._add("queued", job.id, arrival_unix_ns, job.prompt_tokens, traceparent, at_ns=at_ns)
        if job.load:
            peer = (_text(kv, "remote_engine_id"), _text(kv, "remote_request_id"), _text(kv, "remote_host"))
            port = kv.get("remote_port")
            known = (_CONNECTOR, self._engine_id, *peer, port if isinstance(port, int) else None, _DIRECTION, _MODE, None)
            self._add("kv_known", job.id, *known, at_ns=at_ns)

    def first_token(self, request_id: str, at_ns: int) -> None:
        self._scheduled(request_id, self._core.scheduled_ns(request_id))
        self._add("first_token", request_id, at_ns=at_ns)

    def preempted(self, request_id: str) -> None:
        self._add("preempted", request_id)

    def resumed(self, request_id: str) -> None:
        self._add("scheduled", request_id, None, None)

    def ended(self, ended: Ended) -> None:
        self._scheduled(ended.id, ended.times.scheduled_ns)
        self._sent.discard(ended.id)
        self._add("finished", ended.id, _STATUS[ended.reason], ended.generated)
        if ended.published is not None:
            tokens = ended.published.tokens
            kept = (tokens, len(ended.published.blocks), tokens * self._scenario.kv_bytes_per_token, self._lease_ns)
            self._add("kv_published", ended.id, _CONNECTOR, self._engine_id, *kept, _DIRECTION, _MODE, None)

    def step(self, step: StepEnded) -> None:
        load = self._core.load()
        ran = (step.requests, step.prefill_requests, step.prefill_tokens, step.tokens - step.prefill_tokens, step.preemptions)
        self._add("step", step.begin_ns, *ran, load.running, load.waiting, step.landed, step.resumed_tokens)

    def _scheduled(self, request_id: str, at_ns: int | None) -> None:
        """Report the first scheduling of a request once it is known.

        The core makes it known only later.
        """
        if at_ns is not None and request_id not in self._sent:
            self._sent.add(request_id)
            self._add("scheduled", request_id, None, None, at_ns=at_ns)

    # --- KV that it reads -----------------------------------------------------------------------------------------------

    def load(self, load: LoadStarts, kv_bytes: int, tokens: int) -> None:
        """Report a load that starts. ``tokens``: the tokens whose KV is not here yet."""
        wanted = (load.tokens, load.tokens - tokens, blocks_for(tokens), kv_bytes, True)
        self._add("kv_wanted", load.id, _CONNECTOR, self._engine_id, *wanted)
        self._add("kv_load", load.id, _RANK)

    @contextlib.contextmanager
    def contact(self, peer_engine_id: str) -> Iterator[None]:
        """Report a first contact that may happen inside this context.

        The report is made at its end, and only where it took time.
        """
        begin_ns = time.monotonic_ns()
        ok = False
        try:
            yield
            ok = True
        finally:
            if time.monotonic_ns() - begin_ns >= _CONTACT_TAKES_NS:
                self._add("kv_handshake", peer_engine_id, _RANK, begin_ns, None, at_ns=begin_ns)
                self._add("kv_handshake", peer_engine_id, _RANK, begin_ns, ok)

    def posted(self, request_id: str, at_ns: int) -> None:
        self._add("kv_posted", request_id, _RANK, False, at_ns=at_ns)

    def done(self, request_id: str, kv_bytes: int, descriptors: int) -> None:
        self._add("kv_done", request_id, _RANK, kv_bytes, descriptors, 0, False)

    def failed(self, request_id: str, kind: str, peer_engine_id: str) -> None:
        self._add("kv_failure", request_id, _RANK, kind, "NIXL_ERR_REMOTE_DISCONNECT", peer_engine_id)

    def loaded(self, request_id: str, *, ok: bool, noticed_ns: int) -> None:
        """Report that the worker is done with a load.

        The scheduler sees it at ``noticed_ns``.
        """
        self._add("kv_loaded", request_id, _RANK, not ok, 0)
        self._add("kv_noticed", request_id, not ok, at_ns=noticed_ns)

    # --- KV that it keeps -----------------------------------------------------------------------------------------------

    def renewed(self, request_id: str) -> None:
        self._add("kv_lease", request_id, self._lease_ns)

    def read(self, request_id: str, *, late: bool) -> None:
        self._add("kv_read", request_id, _RANK, None, late, 0)
        if not late:
            self._add("kv_freed", request_id)

    def expired(self, request_id: str) -> None:
        self._add("kv_expired", request_id, _RANK)
        self._add("kv_freed", request_id)


def _text(kv: Mapping[str, Any], name: str) -> str | None:
    found = kv.get(name)
    return None if found is None else str(found)
