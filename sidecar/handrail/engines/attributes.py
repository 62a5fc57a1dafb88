"""Values out of OTLP attributes, by the type that was asked for; anything else is None."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


def table(attributes: Iterable[KeyValue]) -> dict[str, AnyValue]:
    """Attributes by key; of a duplicated key the last one counts."""
    return {a.key: a.value for a in attributes}


def text(values: dict[str, AnyValue], key: str) -> str | None:
    """A non-empty string."""
    value = values.get(key)
    return (value.string_value or None) if value is not None else None


def integer(values: dict[str, AnyValue], key: str) -> int | None:
    """An integer; decimal strings count, since vllm-router sends ports and status codes as strings."""
    value = values.get(key)
    if value is None:
        return None
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return value.int_value
    if kind == "double_value" and value.double_value.is_integer():  # False for NaN and infinities
        return int(value.double_value)
    if kind == "string_value" and len(value.string_value) < 19 and value.string_value.isdecimal():
        return int(value.string_value)
    return None


def number(values: dict[str, AnyValue], key: str) -> float | None:
    """A number, whatever its width."""
    value = values.get(key)
    if value is None:
        return None
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return value.double_value
    return float(value.int_value) if kind == "int_value" else None
