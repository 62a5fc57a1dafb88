"""A second observer inside the engine, for tests only.

Tests compare it with Handrail's plugin. The two share no hook.
It listens where the plugin does not: vLLM's own debug lines of a request's KV (a logging handler; the text is vLLM's, the time
that of the record), the stamps that vLLM keeps of each request for its statistics, NIXL's telemetry as those statistics get it,
and an ASGI layer of its own. One JSON line each in ``$KV_OBSERVER_LOG.<pid>``. Without the variable it is inert.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

LINES = ("start_load_kv for request", "Finished recving KV transfer for request", "NIXL handshake: add agent took")
PARTS = 8  # of a response, kept whole


class Notes:
    """The file of this process.

    Its first line gives the offset between the process's two clocks.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(f"{path}.{os.getpid()}")
        self._lock = threading.Lock()
        self.write(what="clocks", monotonic_ns=time.monotonic_ns(), unix_ns=time.time_ns())

    def write(self, **note: Any) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(note) + "\n")


_notes: dict[int, Notes] = {}


def notes() -> Notes | None:
    """Of this process: a fork gets a file of its own."""
    path = os.environ.get("KV_OBSERVER_LOG")
    if not path:
        return None
    return _notes.setdefault(os.getpid(), Notes(path)) if os.getpid() not in _notes else _notes[os.getpid()]


class DebugLines(logging.Handler):
    """vLLM's debug lines of one request's KV; nothing more is printed than before."""

    def emit(self, record: logging.LogRecord) -> None:
        found = notes()
        if found is not None and isinstance(record.msg, str) and record.msg.startswith(LINES):
            found.write(what="line", unix_ns=round(record.created * 1e9), text=record.getMessage()[:200])


def _watch_stamps(statistics: Any) -> None:
    original = statistics.update_from_finished_request

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        found, stats = notes(), named.get("req_stats", given[4] if len(given) > 4 else None)
        if found is not None and stats is not None:
            found.write(
                what="stamps",
                request_id=named.get("request_id", given[1] if len(given) > 1 else ""),
                queued_ns=round(stats.queued_ts * 1e9),  # monotonic, of the engine's core
                scheduled_ns=round(stats.scheduled_ts * 1e9),
                first_token_ns=round(stats.first_token_ts * 1e9),
            )
        return original(self, *given, **named)

    statistics.update_from_finished_request = wrapped


def _watch_transfers(statistics: Any) -> None:
    original = statistics.record_transfer

    def wrapped(self: Any, res: Any) -> Any:
        found = notes()
        if found is not None and res is not None:
            found.write(
                what="transfer",
                unix_ns=time.time_ns(),
                started_us=res.startTime,
                post_us=res.postDuration,
                took_us=res.xferDuration,
                bytes=res.totalBytes,
                descriptors=res.descCount,
            )
        return original(self, res)

    statistics.record_transfer = wrapped


def register() -> None:
    """Called by vLLM in each process, in some more than once."""
    if not os.environ.get("KV_OBSERVER_LOG"):
        return
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, DebugLines) for handler in logger.handlers):
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.v1.metrics.stats import IterationStats

    for handler in logger.handlers:
        handler.setLevel(max(handler.level, logging.INFO))
    logger.addHandler(DebugLines())
    logger.setLevel(logging.DEBUG)
    _watch_stamps(IterationStats)
    _watch_transfers(NixlKVConnectorStats)


class Door:
    """The middleware that notes a request's arrival and its first response parts.

    Load it with ``--middleware kv_observer.Door``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = notes()
        if found is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrived_ns = time.monotonic_ns()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        parts: list[tuple[int, str]] = []
        last_ns = arrived_ns

        async def watched(message: Any) -> None:
            nonlocal last_ns
            if message["type"] == "http.response.body":
                last_ns = time.monotonic_ns()
                if message.get("body") and len(parts) < PARTS:
                    parts.append((last_ns - arrived_ns, message["body"].decode(errors="replace")))
            await send(message)

        await self._app(scope, receive, watched)
        name = headers.get("x-request-id", "")
        found.write(what="door", request_id=name, arrived_ns=arrived_ns, ended_ns=last_ns, parts=parts)
