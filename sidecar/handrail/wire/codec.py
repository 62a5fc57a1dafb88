"""Write and read the attributes of OTLP spans and log records, by type and record.

A record's attribute is named by its table's prefix and the field (``handrail.kv.fetch.`` + ``bytes_moved``), so that a field's
name is only in ``records/``. ``read(write(x)) == x`` where numbers are sane; an absurd value reads as not seen and raises
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from handrail.otlp.values import LARGEST, LATEST_UNIX_NS, Attributes, AttributeValue
from handrail.records import Direction, FetchEffect, LineClock, LogKind, ProcessEventKind


def clean_text(text: str) -> str:
    """``text`` as protobuf can carry it.

    Lone surrogates (undecodable bytes) are escaped, so that distinct ids stay distinct.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def add_text(entries: Any, name: str, value: str) -> None:
    # add() and two assignments take 0.4 us; add(key=..., value=AnyValue(...)) takes 1.0.
    entry = entries.add()
    entry.key = name
    entry.value.string_value = clean_text(value)


def add_number(entries: Any, name: str, value: int) -> None:
    if 0 <= value < LARGEST:  # some server's usage block may hold any value
        entry = entries.add()
        entry.key = name
        entry.value.int_value = value


def add_flag(entries: Any, name: str, value: bool) -> None:
    entry = entries.add()
    entry.key = name
    entry.value.bool_value = value


def add_bytes(entries: Any, name: str, value: bytes) -> None:
    entry = entries.add()
    entry.key = name
    entry.value.bytes_value = value


def add_texts(entries: Any, name: str, value: tuple[str, ...]) -> None:
    entry = entries.add()
    entry.key = name
    entry.value.array_value.values.extend(AnyValue(string_value=clean_text(text)) for text in value)


def add_numbers(entries: Any, name: str, value: tuple[int, ...]) -> None:
    if all(0 <= number < LARGEST for number in value):
        entry = entries.add()
        entry.key = name
        entry.value.array_value.values.extend(AnyValue(int_value=number) for number in value)


def add_unix(entries: Any, name: str, value: int) -> None:
    if 0 < value < LATEST_UNIX_NS:
        entry = entries.add()
        entry.key = name
        entry.value.int_value = value


def add_word(entries: Any, name: str, value: Enum) -> None:
    add_text(entries, name, value.value)


def read_text(value: AttributeValue) -> str | None:
    return value if isinstance(value, str) else None


def read_number(value: AttributeValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def read_flag(value: AttributeValue) -> bool | None:
    return value if isinstance(value, bool) else None


def read_bytes(value: AttributeValue) -> bytes | None:
    return value if isinstance(value, bytes) else None


def read_texts(value: AttributeValue) -> tuple[str, ...] | None:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, tuple) else None


def read_numbers(value: AttributeValue) -> tuple[int, ...] | None:
    """Read all numbers, or None where one is absurd.

    A partial result has no use, since the order shows which numbers belong together.
    """
    numbers = [read_number(item) for item in value] if isinstance(value, tuple) else [None]
    return tuple(number for number in numbers if number is not None) if None not in numbers else None


def read_unix(value: AttributeValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LATEST_UNIX_NS else None


def _read_word(words: type[Enum]) -> Callable[[AttributeValue], Enum | None]:
    known = {word.value: word for word in words}
    return lambda value: known.get(value) if isinstance(value, str) else None


_Pair = tuple[Callable[[Any, str, Any], None], Callable[[AttributeValue], Any]]
_BY_TYPE: Final[Mapping[str, _Pair]] = {
    "str": (add_text, read_text),
    "int": (add_number, read_number),
    "bool": (add_flag, read_flag),
    "tuple[str, ...]": (add_texts, read_texts),
    "tuple[int, ...]": (add_numbers, read_numbers),
    **{word.__name__: (add_word, _read_word(word)) for word in (Direction, FetchEffect, ProcessEventKind, LogKind, LineClock)},
}

T = TypeVar("T")


class RecordTable(Generic[T]):
    """Attributes of one record class: every field but ``carried``.

    The ``carried`` fields travel elsewhere in the span or log record.
    """

    def __init__(self, kind: type[T], prefix: str, carried: Iterable[str]) -> None:
        left_out = frozenset(carried)
        chosen = [f for f in fields(kind) if f.name not in left_out]  # type: ignore[arg-type]  # T is a dataclass
        pairs = {f.name: _pair(f.name, str(f.type)) for f in chosen}
        self._values: Callable[[Any], tuple[Any, ...]] = attrgetter(*(f.name for f in chosen))
        self._rows = tuple((prefix + f.name, None if f.default is MISSING else f.default, pairs[f.name][0]) for f in chosen)
        self._readers = {prefix + f.name: (f.name, pairs[f.name][1]) for f in chosen}
        self.required = frozenset(f.name for f in chosen if f.default is MISSING)
        self.names = tuple(self._readers)

    def write(self, entries: Any, record: T) -> None:
        """Append every field that is not at its default to a repeated KeyValue field."""
        for (name, default, add), value in zip(self._rows, self._values(record), strict=True):
            if value != default:
                add(entries, name, value)

    def read(self, attributes: Attributes) -> dict[str, Any]:
        """Sane values by field.

        Raises ValueError where a field without a default is missing.
        """
        found = {}
        readers = self._readers
        for key, given in attributes.items():
            if (row := readers.get(key)) is not None and (value := row[1](given)) is not None:
                found[row[0]] = value
        if not self.required <= found.keys():
            raise ValueError(f"missing: {', '.join(sorted(self.required - found.keys()))}")
        return found


def _pair(name: str, type_name: str) -> _Pair:
    """Writer and reader for a field of this type; KeyError for an unsupported type."""
    if name.endswith("_unix_ns"):
        return add_unix, read_unix
    return _BY_TYPE[type_name.removesuffix(" | None")]
