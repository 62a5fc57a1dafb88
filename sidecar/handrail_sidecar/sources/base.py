"""The contract of a source: it reads one kind of evidence and passes it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from handrail.records import Observation

Sink = Callable[[Observation], None]
"""Takes one finished record.

It never blocks and never raises; it counts drops itself. Records are frozen and may be kept.
"""


class RecordSource(Protocol):
    """A part of the sidecar that produces records.

    The OTLP tap passes batches on instead.
    ``start`` binds sockets or opens files and returns once it observes; it raises ``OSError`` that names what is not available.
    ``shutdown`` takes no new work, gives running exchanges up to ``drain_seconds``, flushes; works without ``start`` and twice.
    """

    async def start(self) -> None: ...

    async def shutdown(self, drain_seconds: float) -> None: ...
