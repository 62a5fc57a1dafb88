"""The contract between an OTLP receiver and whoever takes what it received. Used by the sidecar's tap and by the collector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol


class Signal(str, Enum):
    """The three OTLP signals; the value is the last part of the HTTP path."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Taken over. ``rejected`` items of the request were refused for good; ``message`` says why (or is a warning when 0)."""

    rejected: int = 0
    message: str = ""


class Retryable(Exception):  # noqa: N818 - an answer to the sender, not a fault of ours
    """Not taken; the sender should try the same bytes again after ``delay_s`` seconds."""

    def __init__(self, reason: str, delay_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_s = delay_s


class Rejected(Exception):  # noqa: N818 - as above
    """Not taken and never will be (malformed, refused, too large). ``reason`` is safe to show to the sender."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Consumer(Protocol):
    """Takes one export request: the receiver owns nothing of it once ``consume`` returned, and acknowledges only then.

    ``payload`` is the protobuf encoding of ``Export{Trace,Metrics,Logs}ServiceRequest``, already checked to parse and with bad
    items removed; it must not be changed. Raises ``Retryable`` or ``Rejected``; anything else is a bug, answered as retryable.
    """

    async def consume(self, signal: Signal, payload: bytes) -> None: ...


KIND_OF_SIGNAL: Final = {Signal.TRACES: 1, Signal.METRICS: 2, Signal.LOGS: 3}

SIGNAL_OF_KIND: Final = {kind: signal for signal, kind in KIND_OF_SIGNAL.items()}
"""The record kinds of a segmented log of export requests: of the spool and of the collector's journal."""
