"""Repair single values that keep an OTLP export request from parsing.

The rest of the request arrives as it was sent. protobuf refuses a whole request for one string that is not UTF-8 (a host name in
Latin-1, a text cut within a character), and JSON's reader for one number out of range. It runs only after a request was
refused, so only senders of such values pay for it.
In such a string, the bytes that are not ASCII become ``?``; in a string that is only cut, the last character does. The string
keeps its length, and is repaired in place. Numbers out of range become the nearest in range, or text in an attribute.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from handrail.otlp.messages import SHAPES
from handrail.otlp.payload import LEN, fields
from handrail.otlp.signals import Signal

_MOST_FIELDS: Final = 500_000  # examined one by one, which takes about 1 us each
_MOST_PARSES: Final = 16  # of the request's size: a string lies six messages deep in a span, deeper in nested attributes
_DEEPEST: Final = 100  # as protobuf's own parser
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class _Message:
    """One message type: its text fields and its message fields."""

    parse: Callable[[bytes], Any]
    texts: set[int] = field(default_factory=set)
    messages: dict[int, _Message] = field(default_factory=dict)


@cache
def _table(signal: Signal) -> _Message:
    known: dict[str, _Message] = {}

    def made(descriptor: Descriptor) -> _Message:
        if descriptor.full_name not in known:
            table = known[descriptor.full_name] = _Message(GetMessageClass(descriptor).FromString)
            for each in descriptor.fields:
                if each.type == FieldDescriptor.TYPE_STRING:
                    table.texts.add(each.number)
                elif each.type == FieldDescriptor.TYPE_MESSAGE and each.message_type is not None:
                    table.messages[each.number] = made(each.message_type)
        return known[descriptor.full_name]

    return made(SHAPES[signal].request.DESCRIPTOR)


def repaired(signal: Signal, body: bytes) -> tuple[bytes, int]:
    """``body`` with every string in it UTF-8, and the number of repaired strings.

    The length stays the same. Only parts that do not parse are examined. Raises ``ValueError`` where the body is no protobuf
    message, or the search takes too long.
    """
    work = _Work(bytearray(body), len(body) * _MOST_PARSES)
    work.look(_table(signal), 0, len(body), 0)
    return bytes(work.data), work.count


class _Work:
    def __init__(self, data: bytearray, most_parsed_bytes: int) -> None:
        self.data = data
        self.count = 0
        self._fields_left = _MOST_FIELDS
        self._bytes_left = most_parsed_bytes

    def look(self, table: _Message, start: int, end: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError("nested too deep")
        for found in fields(self.data, start, end):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise ValueError("too many fields to look at")
            if found.wire_type != LEN:
                continue
            if found.number in table.texts:
                self._repair_field(found.value, found.end)
            elif (inner := table.messages.get(found.number)) is not None and not self._parses(inner, found.value, found.end):
                self.look(inner, found.value, found.end, depth + 1)

    def _parses(self, table: _Message, start: int, end: int) -> bool:
        self._bytes_left -= end - start
        if self._bytes_left < 0:
            raise ValueError("too many bytes to look at")
        try:
            table.parse(bytes(self.data[start:end]))
        except DecodeError:
            return False
        return True

    def _repair_field(self, start: int, end: int) -> None:
        text = bytes(self.data[start:end])
        try:
            text.decode()
        except UnicodeDecodeError as error:
            self.data[start:end] = _same_length(text, error)
            self.count += 1


def _same_length(text: bytes, error: UnicodeDecodeError) -> bytes:
    if error.end == len(text):  # cut within its last character
        return text[: error.start] + b"?" * (len(text) - error.start)
    return text.decode("ascii", "replace").replace("\ufffd", "?").encode()


def repaired_json(body: bytes) -> tuple[Any, int]:
    """JSON document of ``body`` with valid text and numbers, and the count of repairs.

    Text is such that protobuf takes it, numbers are in range. Raises ``ValueError`` and ``RecursionError`` where the body is no
    JSON.
    """
    text = body.decode("utf-8", "replace")
    count = text.count("\ufffd") - body.count("\ufffd".encode())
    document = json.loads(text)
    # Not recursion: the sender controls the depth.
    stack: list[Any] = [document] if isinstance(document, (dict, list)) else []
    while stack:
        node = stack.pop()
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(node, dict) and _SURROGATE.search(str(key)):  # no field has such a name
                del node[key]
                count += 1
                continue
            if isinstance(value, (dict, list)):
                stack.append(value)
                continue
            better = _in_range(key, value)
            if better is not value:
                node[key] = better
                count += 1
        if isinstance(node, dict) and isinstance(node.get("intValue"), _Text):
            node["stringValue"] = str(node.pop("intValue"))
    return document, max(count, 0)


class _Text(str):
    """Invalid number that is sent on as text."""


def _in_range(key: object, value: Any) -> Any:
    """``value`` or its replacement; the same object where it is valid."""
    if isinstance(value, str) and _SURROGATE.search(value):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # as protobuf's JSON has them
    if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return value
    bounds = _BOUNDS.get(key) or (_UNSIGNED if key.endswith(("UnixNano", "unix_nano")) else None)
    if bounds is None:
        return value
    try:
        number = int(value)
    except ValueError:
        return _Text(value) if key == "intValue" else 0
    if bounds[0] <= number <= bounds[1] and (not isinstance(value, float) or value == number):
        return value
    return _Text(value) if key == "intValue" else max(bounds[0], min(number, bounds[1]))


_UNSIGNED: Final = (0, 2**64 - 1)
_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "intValue": (-(2**63), 2**63 - 1),
    "asInt": (-(2**63), 2**63 - 1),
    "count": _UNSIGNED,
    "flags": (0, 2**32 - 1),
    "droppedAttributesCount": (0, 2**32 - 1),
    "droppedEventsCount": (0, 2**32 - 1),
    "droppedLinksCount": (0, 2**32 - 1),
}
"""Number fields in OTLP's JSON, beside times, that are repaired.

snake_case spellings are rare; there, an invalid number still costs the request.
"""
