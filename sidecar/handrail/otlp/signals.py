"""Contract between an OTLP receiver and its consumer: signals and refusals.

The sidecar's tap and the collector use it.
"""

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
    """The consumer took the request over.

    ``rejected`` items of it were refused for good; ``message`` says why (or is a warning when ``rejected`` is 0).
    """

    rejected: int = 0
    message: str = ""


class Retryable(Exception):  # noqa: N818 - an answer to the sender, not a fault of ours
    """Refusal for now: the sender should retry the same bytes after ``delay_s`` s."""

    def __init__(self, reason: str, delay_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_s = delay_s


class Rejected(Exception):  # noqa: N818 - as above
    """Refusal for good: malformed, refused or too large.

    ``reason`` is safe to show to the sender.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Consumer(Protocol):
    """Consumer of export requests.

    It owns a request once ``consume`` has returned, and the receiver acknowledges only then.
    ``payload`` is the protobuf encoding of ``Export{Trace,Metrics,Logs}ServiceRequest``. The receiver has checked that it parses
    and has removed bad items; the consumer must not change it. Raises ``Retryable`` or ``Rejected``; anything else is a bug,
    answered as retryable.
    """

    async def consume(self, signal: Signal, payload: bytes) -> None: ...


KIND_OF_SIGNAL: Final = {Signal.TRACES: 1, Signal.METRICS: 2, Signal.LOGS: 3}

SIGNAL_OF_KIND: Final = {kind: signal for signal, kind in KIND_OF_SIGNAL.items()}
"""Record kinds in a segmented log of export requests: spool and journal."""


class TooLarge(Rejected):
    """Body, raw or decompressed, that is over the bound: HTTP 413."""


class Unsupported(Rejected):
    """Content type or content encoding that OTLP does not have: HTTP 415."""


class TooSlow(Rejected):
    """Body that did not arrive in time: HTTP 408."""


class ReceiverUnavailable(Retryable):
    """The receiver stops, or has a bug: HTTP 503 and gRPC ``UNAVAILABLE``.

    A plain ``Retryable`` means full: 429 and ``RESOURCE_EXHAUSTED``.
    """


class PayloadRejected(Rejected):
    """Refusal because of this payload's content.

    HTTP 400 or 413, ``INVALID_ARGUMENT``. The peer may still take a part of the payload.
    """


class AuthFailed(Retryable):
    """We and the peer do not trust each other.

    Nothing is wrong with the payload; it waits until an operator repairs the trust.
    """


class Unauthorized(AuthFailed):
    """The peer accepts none of our requests.

    HTTP 401 or 403, ``UNAUTHENTICATED`` or ``PERMISSION_DENIED``.
    """


class Untrusted(AuthFailed):
    """No TLS with the peer.

    One side does not accept the other's certificate, or uses none.
    """


class ConnectionClosed(Retryable):
    """The peer hung up before it answered."""
