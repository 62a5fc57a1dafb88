"""Observe vLLM's NIXL worker through its private members.

It covers handshakes, when a transfer was posted and was done, bytes, failure types, leases, and the readers. The members
(v1/nixl/{base,pull,push}_worker.py, seen on 0.32) are wrapped on the object, each only where it exists. A missing one costs its
detail and is named in the engine's facts. The calls come on the worker's main thread, on NIXL's handshake threads and, in push
mode, on the writer's thread.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from handrail.plugin.connector import WorkerSide
from handrail.plugin.events import KV_DONE, KV_EXPIRED, KV_FAILURE, KV_HANDSHAKE, KV_LEASE, KV_POSTED, KV_READ
from handrail.plugin.guard import HookGuard

_ERROR_NAME: Final = re.compile(r"\b(?:NIXL|UCS|UCX)_[A-Z_]{3,60}\b")
_MAX_HANDLES: Final = 65_536


class NixlWatch:
    """Observer of one NIXL worker, from the worker's own calls."""

    def __init__(self, worker: Any, side: WorkerSide, rank: int, guard: HookGuard) -> None:
        self._worker = worker
        self._side = side
        self._rank = rank
        self._record = guard.recorder.record
        self._current = threading.local()  # the request whose transfers this thread posts
        self._handles: dict[Any, tuple[str, bool]] = {}  # transfer -> request, whether we write
        self._notified_ns = time.monotonic_ns()

    # --- transfers --------------------------------------------------------------------------------------------------------
    def posting(self, request_id: str | None, writes: bool) -> None:
        self._current.request = (request_id, writes) if request_id else None

    def posted(self, handle: Any, at_ns: int) -> None:
        """Record that the worker posted a transfer.

        ``at_ns`` is read before the call, since a small transfer may be done within it.
        """
        request = getattr(self._current, "request", None)
        if request is not None:
            if len(self._handles) >= _MAX_HANDLES:
                self._handles.clear()
            self._handles[handle] = request
            self._record((KV_POSTED, at_ns, request[0], self._rank, request[1]))

    def done(self, handle: Any, telemetry: Any) -> None:
        """Record that a step's poll found a transfer done; it is at most one poll late."""
        request = self._handles.pop(handle, None)
        if request is not None:
            now = time.monotonic_ns()
            moved, descriptors = int(telemetry.totalBytes), int(telemetry.descCount)
            self._record((KV_DONE, now, request[0], self._rank, moved, descriptors, now - self._side.polled_ns, request[1]))

    def registered(self, request_id: str) -> None:
        """Push mode, D: record that P has received the addresses to write to."""
        self._record((KV_POSTED, time.monotonic_ns(), request_id, self._rank, False))

    # --- handshakes, failures ---------------------------------------------------------------------------------------------
    def handshake(self, engine_id: Any, begin_ns: int, ok: bool | None) -> None:
        at_ns = begin_ns if ok is None else time.monotonic_ns()
        self._record((KV_HANDSHAKE, at_ns, str(engine_id), self._rank, begin_ns, ok))

    def failure(self, failure_type: Any, request_id: Any, error: Any, engine_id: Any) -> None:
        request = request_id if isinstance(request_id, str) else None
        peer = engine_id if isinstance(engine_id, str) else None
        self._record((KV_FAILURE, time.monotonic_ns(), request, self._rank, str(failure_type), error_name(error), peer))

    # --- notifications from peers -----------------------------------------------------------------------------------------
    def notified(self, notifications: Any) -> None:
        """Handle notifications: ``agent -> [messages]``.

        A message is ``<request id>:<readers>`` once a peer has read (or written to us), or a heartbeat.
        """
        now, before, self._notified_ns = time.monotonic_ns(), self._notified_ns, 0
        self._notified_ns = now
        for agent, messages in notifications.items():
            for message in messages:
                if not message.startswith((b"HB:", b"PUSH_REG:")):
                    self._read(str(agent), message.rsplit(b":", 1)[0].decode(), now, now - before)

    def _read(self, agent: str, request_id: str, now: int, bound_ns: int) -> None:
        worker = self._worker
        if request_id in worker._reqs_to_send or request_id in worker._reqs_to_process:
            self._record((KV_READ, now, request_id, self._rank, agent, False, bound_ns))
        elif request_id in worker._recving_metadata:  # push mode, D: P has written
            self._record((KV_DONE, now, request_id, self._rank, None, None, bound_ns, False))
        else:
            self._record((KV_READ, now, request_id, self._rank, agent, True, bound_ns))

    def expired(self, request_ids: set[str]) -> None:
        now = time.monotonic_ns()
        for request_id in request_ids:
            self._record((KV_EXPIRED, now, request_id, self._rank))

    def heartbeat(self, payload: str) -> None:
        now, clock = time.monotonic_ns(), time.perf_counter()
        for request_id in payload.split(","):
            ends = self._worker._reqs_to_send.get(request_id)
            if ends is not None:
                self._record((KV_LEASE, now, request_id, max(0, int((ends - clock) * 1e9))))


def error_name(error: Any) -> str | None:
    """Transport's own name of an error, else the exception's class; never its text."""
    if error is None:
        return None
    found = _ERROR_NAME.search(str(error))
    return found[0] if found else type(error).__name__


def watch_nixl(worker: Any, side: WorkerSide, rank: int, guard: HookGuard) -> None:
    """Wrap the members above that ``worker`` has, and report them."""
    watch = NixlWatch(worker, side, rank, guard)
    agent = worker.nixl_wrapper
    plans: tuple[tuple[Any, str, Callable[..., Callable[..., Any]]], ...] = (
        (worker, "_read_blocks", _posting(False)),
        (worker, "_xfer_blocks", _posting(True)),
        (worker, "_do_send_reg_notif", _registering),
        (worker, "_nixl_handshake", _handshaking),
        (worker, "_log_failure", _failing),
        (worker, "_reap_expired_send_leases", _reaping),
        (worker, "_handle_heartbeat", _heartbeat),
        (agent, "transfer", _transferring),
        (agent, "get_xfer_telemetry", _telemetry),
        (agent, "get_new_notifs", _notifying),
    )
    hooked, missing = [], []
    for owner, name, wrap in plans:
        original = getattr(owner, name, None)
        if original is None:
            missing.append(f"nixl.{name}")
            continue
        setattr(owner, name, wrap(original, watch, guard))
        hooked.append(f"nixl.{name}")
    other_mode = "_xfer_blocks" if hasattr(worker, "_read_blocks") else "_read_blocks"
    expected_absent = {f"nixl.{other_mode}", "nixl._do_send_reg_notif"}
    guard.recorder.say(
        {
            "nixl_capabilities": hooked,
            "nixl_missing": [name for name in missing if name not in expected_absent],
            "agents": [str(getattr(agent, "name", ""))],
        }
    )


def _posting(writes: bool) -> Callable[..., Callable[..., Any]]:
    def wrap(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            guard("nixl._read_blocks", watch.posting, named.get("request_id"), writes)
            try:
                return original(*given, **named)
            finally:
                guard("nixl._read_blocks", watch.posting, None, writes)

        return wrapped

    return wrap


def _transferring(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def transfer(handle: Any, *rest: Any, **named: Any) -> Any:
        at_ns = time.monotonic_ns()
        result = original(handle, *rest, **named)
        guard("nixl.transfer", watch.posted, handle, at_ns)
        return result

    return transfer


def _telemetry(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def get_xfer_telemetry(handle: Any, *rest: Any, **named: Any) -> Any:
        result = original(handle, *rest, **named)
        guard("nixl.get_xfer_telemetry", watch.done, handle, result)
        return result

    return get_xfer_telemetry


def _notifying(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def get_new_notifs(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        guard("nixl.get_new_notifs", watch.notified, result)
        return result

    return get_new_notifs


def _registering(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def send(request_id: str, *rest: Any, **named: Any) -> Any:
        guard("nixl._do_send_reg_notif", watch.registered, request_id)
        return original(request_id, *rest, **named)

    return send


def _handshaking(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def handshake(host: Any, port: Any, tp_size: Any, engine_id: Any, *rest: Any, **named: Any) -> Any:
        begin_ns = time.monotonic_ns()
        guard("nixl._nixl_handshake", watch.handshake, engine_id, begin_ns, None)
        try:
            result = original(host, port, tp_size, engine_id, *rest, **named)
        except BaseException:
            guard("nixl._nixl_handshake", watch.handshake, engine_id, begin_ns, False)
            raise
        guard("nixl._nixl_handshake", watch.handshake, engine_id, begin_ns, True)
        return result

    return handshake


def _failing(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def log_failure(failure_type: Any, req_id: Any = None, *rest: Any, **named: Any) -> Any:
        engine_id = named.get("dst_engine_id") or named.get("remote_engine_id")
        guard("nixl._log_failure", watch.failure, failure_type, req_id, named.get("error"), engine_id)
        return original(failure_type, req_id, *rest, **named)

    return log_failure


def _reaping(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def reap(done_sending: set[str], *rest: Any, **named: Any) -> Any:
        before = set(done_sending)
        result = original(done_sending, *rest, **named)
        if len(done_sending) > len(before):
            guard("nixl._reap_expired_send_leases", watch.expired, done_sending - before)
        return result

    return reap


def _heartbeat(original: Callable[..., Any], watch: NixlWatch, guard: HookGuard) -> Callable[..., Any]:
    def handle(payload: str, *rest: Any, **named: Any) -> Any:
        result = original(payload, *rest, **named)
        guard("nixl._handle_heartbeat", watch.heartbeat, payload)
        return result

    return handle
