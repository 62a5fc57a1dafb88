"""Split protobuf messages into fields by their bytes.

It changes one part of a message without re-encoding the rest, where a span must keep its sender's bytes.
Source: protobuf encoding specification (varints, the wire types, groups).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, I64, LEN, SGROUP, EGROUP, I32 = range(6)


class MessageField(NamedTuple):
    """One field of a message.

    ``data[start:end]`` is the field with its tag, ``data[value:end]`` without tag and length.
    """

    number: int
    wire_type: int
    start: int
    value: int
    end: int


def fields(data: bytes | bytearray, start: int = 0, end: int | None = None) -> Iterator[MessageField]:
    """Fields of the message in ``data[start:end]``, in order.

    Raises ``ValueError`` where that is not a whole message.
    """
    stop = len(data) if end is None else end
    at = start
    while at < stop:
        tag, value = _varint(data, at, stop)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == LEN:
            size, value = _varint(data, value, stop)
            after = value + size
        else:
            after = _skip(data, number, wire_type, value, stop)
        if after > stop or not number:
            raise ValueError("not a whole protobuf message")
        yield MessageField(number, wire_type, at, value, after)
        at = after


def _varint(data: bytes | bytearray, at: int, stop: int) -> tuple[int, int]:
    result = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
    raise ValueError("not a whole protobuf message")


def _skip(data: bytes | bytearray, number: int, wire_type: int, at: int, stop: int) -> int:
    if wire_type == VARINT:
        return _varint(data, at, stop)[1]
    if wire_type == I64:
        return at + 8
    if wire_type == I32:
        return at + 4
    if wire_type != SGROUP:
        raise ValueError("not a whole protobuf message")
    open_groups = [number]
    while open_groups:  # long deprecated, but a parser must still step over them
        tag, at = _varint(data, at, stop)
        inner, kind = tag >> 3, tag & 7
        if kind == SGROUP:
            open_groups.append(inner)
        elif kind == EGROUP:
            if open_groups.pop() != inner:
                raise ValueError("not a whole protobuf message")
        elif kind == LEN:
            size, at = _varint(data, at, stop)
            at += size
        else:
            at = _skip(data, inner, kind, at, stop)
    return at


def varint(value: int) -> bytes:
    """``value`` (not negative) as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def delimited(number: int, content: bytes) -> bytes:
    """Field ``number`` (below 16) with ``content``: a message, string or bytes."""
    return bytes((number << 3 | LEN,)) + varint(len(content)) + content
