"""Write and read the attributes of OTLP spans and log records, by type and record.

Most records' attributes are named by their table's prefix and the field (``handrail.kv.fetch.`` + ``bytes_moved``), so that a
field's name is only in ``records/``; those of an exchange have names of their own. The type follows from the field in each case.
``read(write(x)) == x`` where numbers are sane; an absurd value reads as not seen and raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from handrail.otlp.values import LARGEST, LATEST_UNIX_NS, AttributeValue
from handrail.records import Direction, FetchEffect, Hint, KvParams, LineClock, LogKind, ProcessEventKind


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


_HINTS: Final = {hint.value: hint for hint in Hint}


def add_hints(entries: Any, name: str, value: tuple[Hint, ...]) -> None:
    add_texts(entries, name, tuple(hint.value for hint in value))


def read_hints(value: AttributeValue) -> tuple[Hint, ...]:
    """Read the hints that this version knows."""
    return tuple(_HINTS[text] for text in read_texts(value) or () if text in _HINTS)


def add_kv_params(entries: Any, name: str, value: KvParams) -> None:
    entry = entries.add()
    entry.key = name
    entry.value.kvlist_value.SetInParent()
    _KV_PARAMS.write(entry.value.kvlist_value.values, value)


def read_kv_params(value: AttributeValue) -> KvParams | None:
    return KvParams(**_KV_PARAMS.read(value)) if isinstance(value, dict) else None


_Pair = tuple[Callable[[Any, str, Any], None], Callable[[AttributeValue], Any]]
_BY_TYPE: Final[Mapping[str, _Pair]] = {
    "str": (add_text, read_text),
    "int": (add_number, read_number),
    "bool": (add_flag, read_flag),
    "bytes": (add_bytes, read_bytes),
    "tuple[str, ...]": (add_texts, read_texts),
    "tuple[int, ...]": (add_numbers, read_numbers),
    "tuple[Hint, ...]": (add_hints, read_hints),
    "KvParams": (add_kv_params, read_kv_params),
    **{word.__name__: (add_word, _read_word(word)) for word in (Direction, FetchEffect, ProcessEventKind, LogKind, LineClock)},
}

T = TypeVar("T")


class RecordTable(Generic[T]):
    """Attributes of one record class.

    ``attributes``: the attribute's name by the field's, in the order of the wire; every other field travels elsewhere.
    """

    def __init__(self, kind: type[T], attributes: Mapping[str, str]) -> None:
        known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
        chosen = [(known[field], name, _pair(field, str(known[field].type))) for field, name in attributes.items()]
        self._values: Callable[[Any], tuple[Any, ...]] = attrgetter(*attributes)
        self._rows = tuple((name, None if f.default is MISSING else f.default, pair[0]) for f, name, pair in chosen)
        self._readers = {name: (f.name, pair[1]) for f, name, pair in chosen}
        self.fields = frozenset(attributes)
        self.required = frozenset(f.name for f, _, _ in chosen if f.default is MISSING)
        self.names = tuple(self._readers)

    @classmethod
    def prefixed(cls, kind: type[T], prefix: str, carried: Iterable[str]) -> RecordTable[T]:
        """Table of every field but ``carried``, named ``prefix`` and the field's name."""
        left_out = frozenset(carried)
        chosen = (f.name for f in fields(kind))  # type: ignore[arg-type]  # T is a dataclass
        return cls(kind, {name: prefix + name for name in chosen if name not in left_out})

    def write(self, entries: Any, record: T) -> None:
        """Append every field that is not at its default to a repeated KeyValue field."""
        for (name, default, add), value in zip(self._rows, self._values(record), strict=True):
            if value != default:
                add(entries, name, value)

    def values(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Sane values by field; a field that is absent or absurd has none."""
        found = {}
        readers = self._readers
        for key, given in attributes.items():
            if (row := readers.get(key)) is not None and (value := row[1](given)) is not None:
                found[row[0]] = value
        return found

    def read(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Sane values by field.

        Raises ValueError where a field without a default is missing.
        """
        found = self.values(attributes)
        if not self.required <= found.keys():
            raise ValueError(f"missing: {', '.join(sorted(self.required - found.keys()))}")
        return found


def _pair(name: str, type_name: str) -> _Pair:
    """Writer and reader for a field of this type; KeyError for an unsupported type."""
    if name.endswith("_unix_ns"):
        return add_unix, read_unix
    return _BY_TYPE[type_name.removesuffix(" | None")]


_KV_PARAMS: Final = RecordTable.prefixed(KvParams, "", ())
