"""Answers to an export: their statuses, and what each means for the batch.

Refusals travel in ``google.rpc.Status`` and ``RetryInfo``. A batch is accepted, to be sent again, or lost. The functions are
pure. Source: OTLP specification 1.x, "Failures", "OTLP/gRPC Throttling", "OTLP/HTTP Response"; googleapis
``google/rpc/{status,error_details,code}.proto``; case G07.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from handrail.otlp.decode import JSON
from handrail.otlp.messages import SHAPES
from handrail.otlp.signals import Accepted, PayloadRejected, Rejected, Retryable, Signal, Unauthorized
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


_RETRYABLE_HTTP: Final = frozenset({429, 502, 503, 504})
_PAYLOAD_HTTP: Final = frozenset({400, 413, 422})
_UNAUTHORIZED_HTTP: Final = frozenset({401, 403})
_Code = grpc.StatusCode
_RETRYABLE_GRPC: Final = frozenset(
    {_Code.CANCELLED, _Code.DEADLINE_EXCEEDED, _Code.ABORTED, _Code.OUT_OF_RANGE, _Code.UNAVAILABLE, _Code.DATA_LOSS}
)
_UNAUTHORIZED_GRPC: Final = frozenset({_Code.UNAUTHENTICATED, _Code.PERMISSION_DENIED})


def read_http(signal: Signal, status: int, headers: Mapping[str, str], body: bytes, now_unix_s: float) -> Accepted:
    """Interpret an HTTP answer.

    ``headers`` must find names in any case. Raises ``Retryable``, ``PayloadRejected`` or ``Rejected``.
    A ``Retryable`` has delay 0 where the peer named none. A failed authentication is retryable, though OTLP calls it final: the
    batch is still good once the token is repaired, and a mistake in a file must not cost it.
    """
    content_type = headers.get("Content-Type", "")
    if 200 <= status < 300:
        return _partial(signal, body, content_type)
    reason = f"HTTP {status}"
    text = _reason(body, content_type)
    if text:
        reason = f"{reason}: {text}"
    if status in _RETRYABLE_HTTP:
        raise Retryable(reason, _retry_after_s(headers.get("Retry-After", ""), now_unix_s))
    if status in _UNAUTHORIZED_HTTP:
        raise Unauthorized(reason, 0.0)
    if 300 <= status < 400:
        raise Rejected(f"{reason}: redirected to {headers.get('Location', 'nowhere')[:200]}; set the endpoint to that")
    raise PayloadRejected(reason) if status in _PAYLOAD_HTTP else Rejected(reason)


def read_grpc(signal: Signal, body: bytes) -> Accepted:
    """Interpret the response of a gRPC call that succeeded."""
    return _partial(signal, body, "")


def grpc_refusal(code: grpc.StatusCode, details: str, status: bytes | None) -> Retryable | Rejected:
    """Exception for a gRPC call that failed.

    ``status``: the bytes of ``grpc-status-details-bin``, if any.
    """
    reason = f"gRPC {code.name}: {clip(details)}" if details else f"gRPC {code.name}"
    delay_s = retry_delay_s(status) if status is not None else None
    if code in _RETRYABLE_GRPC:
        return Retryable(reason, delay_s or 0.0)
    if code in _UNAUTHORIZED_GRPC:
        return Unauthorized(reason, delay_s or 0.0)
    if code is _Code.RESOURCE_EXHAUSTED:
        # With RetryInfo: come back later. Without: the message is over the peer's size limit, and half of it may not be.
        return Retryable(reason, delay_s) if delay_s is not None else PayloadRejected(reason)
    return PayloadRejected(reason) if code is _Code.INVALID_ARGUMENT else Rejected(reason)


def _partial(signal: Signal, body: bytes, content_type: str) -> Accepted:
    """Interpret a full or partial success.

    An unreadable body is a success too: the batch must not be sent again.
    """
    shape = SHAPES[signal]
    if content_type.startswith(JSON):
        partial = _object(_object(_json(body)).get("partialSuccess"))
        count = str(partial.get(shape.rejected_json) or 0)  # int64 is a string in protobuf's JSON; some write a number
        rejected = int(count) if count.isascii() and count.isdigit() and len(count) < 20 else 0
        return Accepted(rejected, clip(str(partial.get("errorMessage") or "")))
    try:
        answer = shape.response.FromString(body).partial_success
    except DecodeError:
        return Accepted()
    return Accepted(max(0, getattr(answer, shape.rejected_field)), clip(answer.error_message))


def _reason(body: bytes, content_type: str) -> str:
    """Message of a ``google.rpc.Status`` body, in either encoding.

    Returns '' for anything else (an HTML page helps nobody).
    """
    if content_type.startswith(JSON):
        return clip(str(_object(_json(body)).get("message") or ""))
    return status_message(body) if "protobuf" in content_type else ""


def _json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _retry_after_s(header: str, now_unix_s: float) -> float:
    """Retry-After in seconds, from seconds or an HTTP date (RFC 9110 section 10.2.3).

    Returns 0 where the header is missing or invalid.
    """
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_unix_s)
    except (ValueError, TypeError, OverflowError):
        return 0.0
