"""OTLP attributes as Python values, decoded once a span.

Decoding attributes is most of the cost of a received span (about 0.6 us each), so nothing decodes them a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

AttributeValue = Union[str, bool, int, float, bytes, None, "tuple[AttributeValue, ...]", "dict[str, AttributeValue]"]
Attributes = Mapping[str, AttributeValue]


def attributes_of(pairs: Sequence[KeyValue]) -> dict[str, AttributeValue]:
    """OTLP key-value pairs as a dictionary; the last of equal keys wins.

    Arrays become tuples, key-value lists dictionaries.
    """
    found: dict[str, AttributeValue] = {}
    for pair in pairs:  # half of the cost of a span: the commonest types without another call
        value = pair.value
        kind = value.WhichOneof("value")
        if kind == "double_value":
            found[pair.key] = value.double_value
        elif kind == "string_value":
            found[pair.key] = value.string_value
        elif kind == "int_value":
            found[pair.key] = value.int_value
        else:
            found[pair.key] = _value(value)
    return found


def text(values: Attributes, key: str) -> str | None:
    """A non-empty string, else None."""
    value = values.get(key)
    return value if isinstance(value, str) and value else None


LATEST_UNIX_NS = 2**62
"""Latest valid time, in the year 2116.

OTLP's times reach four times as far; a later one counts as this, so that no sum of two of ours overflows.
"""

LARGEST = 2**53
"""Bound of counts, sizes and codes.

A value at or above it is damage: no counter of a serving stack gets there.
"""


def integer(values: Attributes, key: str) -> int | None:
    """A whole number from 0 to below ``LARGEST``, else None.

    Decimal strings count, since vllm-router sends ports and status codes as strings.
    """
    value = values.get(key)
    if isinstance(value, bool):
        return None
    whole = isinstance(value, float) and value.is_integer()  # False for NaN and infinities
    digits = isinstance(value, str) and len(value) < 17 and value.isdecimal()
    if isinstance(value, (float, str)) and (whole or digits):
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < LARGEST else None


def number(values: Attributes, key: str) -> float | None:
    """A number, whatever its width, else None."""
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _value(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    found: AttributeValue = getattr(value, kind)
    return found
