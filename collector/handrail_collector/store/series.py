"""Values of samples as columns: one a series, so that they compress and anyone's SQL can read them.

The column of a gauge with fractions is ``g.d.NAME`` or ``g.d.NAME.LABEL``, of a counter of whole numbers ``c.i.NAME.LABEL``. Since
when counters count is ``since_unix_ns``; those of a row that began at another time stand in ``since_more``. A file has at most
``MAX_SERIES_COLUMNS`` of them, the commonest; what is left, and names that are not lower case (DuckDB's column names ignore case),
is JSON in ``more``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from handrail.hardware import DeviceValue
from handrail_collector.store.schema import Column, Encoding

MAX_SERIES_COLUMNS: Final = 256
"""A peer may send any name; each column costs a reader about 100 bytes of every file's footer."""

SERIES_COLUMNS: Final = (
    Column("since_unix_ns", pa.int64(), Encoding.DICTIONARY),
    Column("since_more", pa.string(), Encoding.DICTIONARY),  # JSON: by column, unix ns
    Column("more", pa.string(), Encoding.DICTIONARY),  # JSON: by column
)
"""Besides those of the series."""

_TYPES: Final = {"i": (pa.int64(), Encoding.DELTA), "d": (pa.float64(), Encoding.DICTIONARY)}


def series_table(rows: Sequence[Sequence[DeviceValue]]) -> tuple[dict[str, list[Any]], tuple[Column, ...]]:
    """Lists by column of the values of each row, and the columns of the series in the order of their names."""
    counts: Counter[str] = Counter()
    named = [[(_column_name(v.name, v.label, type(v.value) is int, v.start_unix_ns != 0), v) for v in row] for row in rows]
    for row in named:
        counts.update(name for name, _ in row)
    chosen = sorted(name for name, _ in _commonest(counts))
    lists: dict[str, list[Any]] = {name: [None] * len(rows) for name in chosen}
    since: list[int | None] = [None] * len(rows)
    since_more: list[str | None] = [None] * len(rows)
    more: list[str | None] = [None] * len(rows)
    for at, row in enumerate(named):
        rest: dict[str, float] = {}
        for name, value in row:
            target = lists.get(name)
            if target is None:
                rest[name] = value.value
            else:
                target[at] = value.value
        if rest:
            more[at] = json.dumps(rest)
        starts = {value.start_unix_ns for _, value in row if value.start_unix_ns}
        if starts:
            since[at], since_more[at] = _since(starts, row)
    columns = tuple(Column(name, *_TYPES[name[2]]) for name in chosen)
    return {"since_unix_ns": since, "since_more": since_more, "more": more, **lists}, columns


def series_values(stored: Mapping[str, Any]) -> list[DeviceValue]:
    """Inverse of ``series_table`` for one row, by column name; sorted by name and label. Raises ``ValueError`` for a damaged row."""
    since = stored.get("since_unix_ns")
    others = _loaded(stored.get("since_more"))
    found = []
    for column, value in _valued(stored):
        told = _series_of(column)
        if told is None or not isinstance(value, (int, float)):
            raise ValueError(f"{column}: no value of a series")
        counter, name, label = told
        start = others.get(column, since) if counter else 0
        if not isinstance(start, int):
            raise ValueError(f"{column}: nothing says since when it counts")
        found.append(DeviceValue(name=name, value=value, label=label, start_unix_ns=start))
    return sorted(found, key=lambda each: (each.name, each.label))


def is_series(column: str) -> bool:
    """Whether a column of a file is one of a series."""
    return column[:2] in ("c.", "g.") and column[2:4] in ("i.", "d.")


def name_of(column: str) -> str:
    """The counter of a column of a series."""
    return column.split(".", 3)[2]


def _valued(stored: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield from ((name, value) for name, value in stored.items() if value is not None and is_series(name))
    yield from _loaded(stored.get("more")).items()


def _loaded(text: Any) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError("a JSON object was expected")
    return found


def _since(starts: set[int], row: Sequence[tuple[str, DeviceValue]]) -> tuple[int, str | None]:
    """The start that most counters of a row have, and the others' by column."""
    if len(starts) == 1:
        return starts.pop(), None
    counted = {name: value.start_unix_ns for name, value in row if value.start_unix_ns}
    (common, _), *_ = Counter(counted.values()).most_common(1)
    return common, json.dumps({name: start for name, start in counted.items() if start != common})


def _commonest(counts: Counter[str]) -> list[tuple[str, int]]:
    fitting = Counter({name: count for name, count in counts.items() if name == name.lower()})
    return fitting.most_common(MAX_SERIES_COLUMNS)


@lru_cache(maxsize=8192)
def _column_name(name: str, label: str, whole: bool, counter: bool) -> str:
    """A dot in a name would end it too early, so it stands escaped."""
    escaped = name.replace("%", "%25").replace(".", "%2e")
    return f"{'c' if counter else 'g'}.{'i' if whole else 'd'}.{escaped}{f'.{label}' if label else ''}"


@lru_cache(maxsize=8192)
def _series_of(column: str) -> tuple[bool, str, str] | None:
    """Whether it is a counter, its name, its label."""
    if not is_series(column):
        return None
    kind, _, name, *label = column.split(".", 3)
    return kind == "c", name.replace("%2e", ".").replace("%25", "%"), label[0] if label else ""
