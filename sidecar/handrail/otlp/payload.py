"""Cut and mark an export request's bytes without re-encoding its items.

A message is split into fields by its bytes (protobuf encoding specification: varints, the wire types, groups), so that one part
of it changes while a span keeps its sender's bytes.
The three signals have one layout: request.1 = entry of a resource; entry.1 = resource, entry.2 = entry of a scope; in a scope
entry, 1 = scope, 2 = item (span, metric, log record). Everything here relies on that alone. Source: opentelemetry-proto 1.x, the
``*.proto`` of trace, metrics and logs. Payloads are those a receiver has already parsed; a damaged one raises ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail.conventions import BATCH_SEQ

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


_ENTRY = 1  # of the request
_RESOURCE = 1  # of an entry
_SCOPE_ENTRY = 2
_SCOPE = 1  # of a scope entry
_ITEM = 2
_ATTRIBUTES_OF_RESOURCE = 1
_ATTRIBUTES_OF_SCOPE = 3

_Change = Callable[[bytes], bytes]


def count_items(payload: bytes) -> int:
    """Number of spans, metrics or log records in ``payload``."""
    return sum(
        1
        for entry in _messages(payload, _ENTRY)
        for scope in _messages(payload, _SCOPE_ENTRY, entry)
        for _ in _messages(payload, _ITEM, scope)
    )


def with_resource(payload: bytes, attributes: Mapping[str, str]) -> bytes:
    """Add each of ``attributes`` to every resource that lacks it.

    Existing attributes do not change; items keep their bytes.
    """
    return _rebuilt(payload, _ENTRY, lambda entry: _marked(entry, _RESOURCE, lambda own: _missing_of_resource(own, attributes)))


def with_batch_seq(payload: bytes, seq: int) -> bytes:
    """Set ``handrail.batch.seq`` to ``seq`` on every scope that has none.

    See wire.md, "Spans that pass through a tap".
    """
    mark = KeyValue(key=BATCH_SEQ, value=AnyValue(int_value=seq)).SerializeToString()

    def missing(scope: bytes) -> bytes:
        present = any(attribute.key == BATCH_SEQ for attribute in InstrumentationScope.FromString(scope).attributes)
        return b"" if present else delimited(_ATTRIBUTES_OF_SCOPE, mark)

    return _rebuilt(payload, _ENTRY, lambda entry: _rebuilt(entry, _SCOPE_ENTRY, lambda scope: _marked(scope, _SCOPE, missing)))


def halves(payload: bytes) -> tuple[bytes, bytes] | None:
    """Split into two payloads with half of the items each; None for at most one item.

    The halves lose ``handrail.batch.seq``: a collector drops a (sender, seq) that it has seen, so the second half would be lost.
    Their spans are still deduplicated by their bytes.
    """
    total = count_items(payload)
    if total < 2:
        return None
    middle = total // 2
    return slice_items(payload, 0, middle), slice_items(payload, middle, total)


def slice_items(payload: bytes, start: int, stop: int) -> bytes:
    """Items ``start`` to before ``stop``, with their resources and scopes.

    Empty scopes and the batch seq are left out.
    """
    out: list[bytes] = []
    index = 0
    for entry in _messages(payload, _ENTRY):
        scopes: list[bytes] = []
        for scope in _messages(payload, _SCOPE_ENTRY, entry):
            items = list(_messages(payload, _ITEM, scope))
            chosen = items[max(0, start - index) : max(0, stop - index)]
            index += len(items)
            if chosen:
                kept = b"".join(payload[item.start : item.end] for item in chosen)
                scopes.append(delimited(_SCOPE_ENTRY, _others(payload, scope, _ITEM, _without_seq) + kept))
        if scopes:
            out.append(delimited(_ENTRY, _others(payload, entry, _SCOPE_ENTRY) + b"".join(scopes)))
    return b"".join(out)


def _messages(data: bytes, number: int, within: MessageField | None = None) -> Iterable[MessageField]:
    found = fields(data) if within is None else fields(data, within.value, within.end)
    return (field for field in found if field.number == number and field.wire_type == LEN)


def _rebuilt(message: bytes, number: int, change: _Change) -> bytes:
    """``message`` with ``change`` applied to each sub-message ``number``."""
    return b"".join(
        delimited(number, change(message[field.value : field.end]))
        if field.number == number and field.wire_type == LEN
        else message[field.start : field.end]
        for field in fields(message)
    )


def _marked(message: bytes, number: int, missing: _Change) -> bytes:
    """``message`` with the fields of ``missing`` added to sub-message ``number``.

    ``missing`` returns encoded fields. A sub-message may be in several pieces or absent; pieces of one message, joined, are that
    message.
    """
    pieces = list(fields(message))
    own = b"".join(message[f.value : f.end] for f in pieces if f.number == number and f.wire_type == LEN)
    gained = missing(own)
    if not gained:
        return message
    rest = b"".join(message[f.start : f.end] for f in pieces if f.number != number or f.wire_type != LEN)
    return delimited(number, own + gained) + rest


def _missing_of_resource(resource: bytes, attributes: Mapping[str, str]) -> bytes:
    present = {attribute.key for attribute in Resource.FromString(resource).attributes}
    return b"".join(
        delimited(_ATTRIBUTES_OF_RESOURCE, KeyValue(key=key, value=AnyValue(string_value=value)).SerializeToString())
        for key, value in attributes.items()
        if key not in present
    )


def _others(data: bytes, within: MessageField, number: int, change: _Change | None = None) -> bytes:
    """All fields of ``within`` but ``number``.

    ``change`` is applied to its sub-message 1 (the scope).
    """
    parts = []
    for field in fields(data, within.value, within.end):
        if field.number == number and field.wire_type == LEN:
            continue
        if change is not None and field.number == _SCOPE and field.wire_type == LEN:
            parts.append(delimited(_SCOPE, change(data[field.value : field.end])))
        else:
            parts.append(data[field.start : field.end])
    return b"".join(parts)


def _without_seq(scope: bytes) -> bytes:
    return b"".join(
        scope[field.start : field.end]
        for field in fields(scope)
        if field.number != _ATTRIBUTES_OF_SCOPE
        or field.wire_type != LEN
        or KeyValue.FromString(scope[field.value : field.end]).key != BATCH_SEQ
    )
