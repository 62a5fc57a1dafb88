"""OTLP requests with numbers at the limits of their types, in any field."""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import Message

INT64: Final = (0, 1, -1, 2**31, 2**53 - 1, 2**53, 2**62, 2**63 - 1, -(2**63), -(2**53))
UINT64: Final = (0, 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
INT32: Final = (0, 1, -1, 2**31 - 1, -(2**31))
UINT32: Final = (0, 1, 2**31, 2**32 - 1)
DOUBLES: Final = (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 2.0**63, -(2.0**63), 2.0**64)

_EXTREMES: Final[dict[int, tuple[Any, ...]]] = {
    Kind.TYPE_INT64: INT64,
    Kind.TYPE_SFIXED64: INT64,
    Kind.TYPE_SINT64: INT64,
    Kind.TYPE_UINT64: UINT64,
    Kind.TYPE_FIXED64: UINT64,
    Kind.TYPE_INT32: INT32,
    Kind.TYPE_SINT32: INT32,
    Kind.TYPE_ENUM: INT32,
    Kind.TYPE_UINT32: UINT32,
    Kind.TYPE_FIXED32: UINT32,
    Kind.TYPE_DOUBLE: DOUBLES,
}


def make_extreme(message: Message, rng: random.Random, share: float) -> int:
    """Replace about ``share`` of the numbers in ``message``, in place.

    Returns how many were replaced.
    """
    replaced = 0
    for kind, value in message.ListFields():
        repeated = kind.is_repeated
        if kind.type == Kind.TYPE_MESSAGE:
            for each in value if repeated else (value,):
                replaced += make_extreme(each, rng, share)
        elif kind.type in _EXTREMES:
            places = range(len(value)) if repeated else (None,)
            for at in places:
                if rng.random() < share:
                    chosen = rng.choice(_EXTREMES[kind.type])
                    if at is None:
                        setattr(message, kind.name, chosen)
                    else:
                        value[at] = chosen
                    replaced += 1
    return replaced
