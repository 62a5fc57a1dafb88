"""Refusals that have their own wire answer, beside ``Retryable`` and ``Rejected``."""

from __future__ import annotations

from handrail.otlp.signals import Rejected, Retryable


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
