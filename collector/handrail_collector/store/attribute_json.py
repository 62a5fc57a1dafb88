"""Encode attribute values as JSON text and decode them, with their types kept.

Bytes become ``{"$bytes": base64}``. Arrays are read back as tuples.
A map whose only key starts with ``$`` is wrapped as ``{"$map": ...}``, so that a sender's map is never mistaken for a tag.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from handrail.otlp.values import AttributeValue


def dumps(value: AttributeValue | Mapping[str, AttributeValue]) -> str:
    """Encode a value or a map as compact JSON text."""
    return json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def loads(text: str) -> AttributeValue:
    """Decode the text that ``dumps`` wrote. Raises ``ValueError``."""
    return _value(json.loads(text))


def loads_map(text: str | None) -> dict[str, AttributeValue]:
    """Decode a map that ``dumps`` wrote.

    Returns an empty map for None. Raises ``ValueError`` when the text is no JSON object.
    """
    return parsed(json.loads(text)) if text else {}


def plain(value: object) -> object:
    """Convert a value to types that ``json`` encodes, for use in a larger document."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        items = {key: plain(item) for key, item in value.items()}
        return {"$map": items} if _reserved(items) else items
    return value


def parsed(found: object) -> dict[str, AttributeValue]:
    """Decode a map that ``plain`` made. Raises ``ValueError``."""
    value = _value(found)
    if not isinstance(value, dict):
        raise ValueError("a JSON object was expected")
    return value


def _reserved(value: Mapping[str, object]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _value(found: object) -> AttributeValue:
    if isinstance(found, list):
        return tuple(_value(item) for item in found)
    if isinstance(found, dict):
        if _reserved(found):
            (tag, inner), *_ = found.items()
            if tag == "$bytes":
                return base64.b64decode(inner)
            if tag != "$map":
                raise ValueError(f"unknown tag {tag}")
            return _map(inner)
        return _map(found)
    if found is None or isinstance(found, (str, bool, int, float)):
        return found
    raise ValueError(f"not an attribute value: {type(found).__name__}")


def _map(found: object) -> dict[str, AttributeValue]:
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object was expected, not {type(found).__name__}")
    return {key: _value(item) for key, item in found.items()}
