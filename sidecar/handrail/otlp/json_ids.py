"""Convert ids in OTLP/JSON from hex to base64, for protobuf's JSON parser.

OTLP's JSON mapping differs from protobuf's in the ids alone: they are hex. protobuf reads base64 (and would read 16 hex digits as
12 wrong bytes without an error). Source: OTLP specification 1.x, "JSON Protobuf Encoding".
"""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

from handrail.otlp.signals import Rejected

_ID_KEYS: Final = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_NOT_HEX: Final = base64.b64encode(b"?").decode()  # one byte: no id has that length, so the screen drops that span alone


def tree(body: bytes) -> dict[str, Any]:
    """Parse ``body`` and convert every id to protobuf's form.

    Raises ``Rejected`` for anything but one JSON object.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(f"the body is not JSON ({_brief(error)})") from None
    return with_ids(document)


def with_ids(document: Any) -> dict[str, Any]:
    """Convert every id in ``document`` to protobuf's form, in place.

    Raises ``Rejected`` for anything but one JSON object.
    """
    if not isinstance(document, dict):
        raise Rejected("the body is JSON, but not an object")
    # User data is never a key in OTLP (attributes are lists of key and value), so keys are matched at any depth.
    # A stack, not recursion: the sender controls the depth.
    stack: list[Any] = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(child for child in node if isinstance(child, (dict, list)))
            continue
        for key, value in node.items():
            if key in _ID_KEYS:
                node[key] = _base64(value)
            elif isinstance(value, (dict, list)):
                stack.append(value)
    return document


def _base64(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return _NOT_HEX
    try:
        return base64.b64encode(bytes.fromhex(value)).decode()
    except ValueError:
        return _NOT_HEX


def _brief(error: Exception) -> str:
    return str(error)[:120] or type(error).__name__
