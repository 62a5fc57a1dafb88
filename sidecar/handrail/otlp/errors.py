"""The kinds of refusal with an answer of their own on the wire, beside the contract's plain ``Retryable`` and ``Rejected``."""

from __future__ import annotations

from handrail.otlp.signals import Rejected, Retryable


class TooLarge(Rejected):
    """The body, or what it decompresses to, is over the bound: HTTP 413."""


class Unsupported(Rejected):
    """A content type or content encoding that OTLP does not have: HTTP 415."""


class TooSlow(Rejected):
    """The body did not arrive in time: HTTP 408."""


class ReceiverUnavailable(Retryable):
    """Stopping, or a fault of ours: HTTP 503 and gRPC ``UNAVAILABLE``.

    A plain ``Retryable`` means full: 429 and ``RESOURCE_EXHAUSTED``.
    """


class PayloadRejected(Rejected):
    """Refused for what is in this payload (HTTP 400 or 413, ``INVALID_ARGUMENT``): a part of it may still be taken."""


class AuthFailed(Retryable):
    """We and the peer do not trust each other; nothing is wrong with the payload, and it waits until somebody repairs that."""


class Unauthorized(AuthFailed):
    """The peer takes no request of ours: HTTP 401 or 403, ``UNAUTHENTICATED`` or ``PERMISSION_DENIED``."""


class Untrusted(AuthFailed):
    """No TLS between us: one side does not accept the other's certificate, or speaks none."""


class ConnectionClosed(Retryable):
    """The peer hung up before it answered."""
