"""Encode and decode ``google.rpc.Status`` and ``RetryInfo``.

An OTLP refusal travels in them, over gRPC and over HTTP.
Source: OTLP specification 1.x, "Failures" and "OTLP/HTTP Response"; googleapis ``google/rpc/{status,error_details,code}.proto``.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from handrail.printable import printable

DETAILS_KEY: Final = "grpc-status-details-bin"
_MAX_MESSAGE = 1024  # gRPC sends it in a header, and some peers take only 8 KiB of headers


def clip(message: str) -> str:
    """``message`` as one line of printable text that fits a header."""
    return printable(" ".join(message.split()))[:_MAX_MESSAGE]


def status_bytes(code: int, message: str, delay_s: float | None = None) -> bytes:
    """Encode a ``google.rpc.Status``.

    ``delay_s`` adds a ``RetryInfo``, which makes RESOURCE_EXHAUSTED retryable.
    """
    status = Status(code=code, message=clip(message))
    if delay_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(delay_s * 1e9)))
        detail = Any()
        detail.Pack(retry)
        status.details.append(detail)
    encoded: bytes = status.SerializeToString()
    return encoded


def retry_delay_s(encoded: bytes) -> float | None:
    """Delay in seconds in an encoded ``Status``.

    None when it has no ``RetryInfo`` or does not parse.
    """
    try:
        status = Status.FromString(encoded)
        for detail in status.details:
            retry = RetryInfo()
            if detail.Unpack(retry):
                return max(0.0, float(retry.retry_delay.ToNanoseconds()) / 1e9)
    except Exception:  # a peer's bytes; DecodeError, and ValueError for a duration out of range
        return None
    return None


def status_message(encoded: bytes) -> str:
    """Message of an encoded ``Status``; '' when it does not parse."""
    try:
        return clip(str(Status.FromString(encoded).message))
    except Exception:  # a peer's bytes
        return ""
