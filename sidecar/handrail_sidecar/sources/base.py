"""The contract of a source: what reads one kind of evidence and hands it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from handrail.records import Observation

Sink = Callable[[Observation], None]
"""Takes one finished record. Never blocks, never raises; drops are counted by the sink. Records are frozen and may be kept."""


class RecordSource(Protocol):
    """A part of the sidecar that produces records (or, for the OTLP tap, passes batches on).

    ``start`` binds sockets or opens files and returns once it observes; it raises ``OSError`` that says what could not be had.
    ``shutdown`` takes no new work, gives running exchanges up to ``drain_seconds``, flushes; works without ``start`` and twice.
    """

    async def start(self) -> None: ...

    async def shutdown(self, drain_seconds: float) -> None: ...
