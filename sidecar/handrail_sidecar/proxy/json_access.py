"""Read values of foreign JSON: each has the expected type or is None.

Nothing here raises on a wrong type.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from handrail.printable import is_printable

_NAME_LIMIT: Final = 256  # longer strings are no ids or model names
_COUNT_LIMIT: Final = 1 << 40

# Error types, codes and finish reasons are words of a protocol. Anything else might repeat input and is not kept.
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")

T = TypeVar("T")


def loaded(data: bytes | msgspec.Raw) -> Any:
    """Decode any JSON value.

    Raises ``ValueError`` for anything else, also for nesting deeper than the decoder's stack.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("not JSON") from error


def of_type(value: object, kind: type[T]) -> T | None:
    return value if isinstance(value, kind) else None


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def mapping(value: object) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """A JSON array; an empty one for anything else."""
    return value if isinstance(value, list) else []


def name(value: object) -> str | None:
    """A short non-empty printable string, as ids and model names are."""
    return value if isinstance(value, str) and 0 < len(value) <= _NAME_LIMIT and is_printable(value) else None


def whole_number(value: object) -> int | None:
    """A non-negative 63-bit integer that is not a bool."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def token_count(value: object) -> int | None:
    """A whole number that is possible as a count of tokens."""
    number = whole_number(value)
    return number if number is not None and number < _COUNT_LIMIT else None


def word(value: object) -> str | None:
    """A short word of a protocol, or a number in its place.

    Examples: ``InternalServerError``, ``rate_limit_exceeded``, ``500``.
    """
    spelled = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    return spelled if _WORD.fullmatch(spelled) else None
