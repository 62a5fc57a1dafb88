"""Store the values of samples as one column per series.

Such columns compress well and any SQL client can read them.
The column of a fractional gauge is ``g.d.NAME`` or ``g.d.NAME.LABEL``, that of an integer counter ``c.i.NAME.LABEL``.
``since_unix_ns`` is when counters started to count; ``since_more`` holds the counters that started at another time.
A file has the ``MAX_SERIES_COLUMNS`` most common series as columns.
Others, and names with upper case (DuckDB's column names ignore case), are JSON in ``more``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from handrail.records.devices import DeviceValue, Series
from handrail_collector.store.schema import Encoding, StoreColumn

MAX_SERIES_COLUMNS: Final = 256
"""Most series columns of a file, because a peer may send any name.

Each column costs a reader about 100 bytes of every file's footer.
"""

SERIES_COLUMNS: Final = (
    StoreColumn("since_unix_ns", pa.int64(), Encoding.DICTIONARY),
    StoreColumn("since_more", pa.string(), Encoding.DICTIONARY),  # JSON: unix ns by column
    StoreColumn("more", pa.string(), Encoding.DICTIONARY),  # JSON: value by column
)
"""Columns besides those of the series."""

_TYPES: Final = {"i": (pa.int64(), Encoding.DELTA), "d": (pa.float64(), Encoding.DICTIONARY)}

Block = tuple[int, Sequence[Series]]
"""Number of rows, and their values by series."""


def series_table(blocks: Sequence[Block]) -> tuple[dict[str, list[Any]], tuple[StoreColumn, ...]]:
    """Convert blocks to lists of values by column, and to the columns of the series.

    The columns are ordered by name.
    """
    named = [(rows, [(_column_of(each), each) for each in series]) for rows, series in blocks]
    counts: Counter[str] = Counter()
    for rows, series in named:
        for name, _ in series:
            counts[name] += rows
    lists: dict[str, list[Any]] = {name: [] for name in sorted(_commonest(counts))}
    since: list[int | None] = []
    since_more: list[str | None] = []
    more: list[str | None] = []
    at = 0
    for rows, series in named:
        rest: list[dict[str, float]] = []
        for name, each in series:
            target = lists.get(name)
            if target is None:
                rest = rest or [{} for _ in range(rows)]
                for row, value in zip(rest, each.values, strict=True):
                    row |= {} if value is None else {name: value}
            else:
                _put(target, at, each.values)
        starts, others = _since(rows, series)
        since.extend(starts)
        since_more.extend(others)
        more.extend(json.dumps(row) if row else None for row in rest or [{}] * rows)
        at += rows
    for target in lists.values():
        target.extend([None] * (at - len(target)))
    columns = tuple(StoreColumn(name, *_TYPES[name[2]]) for name in lists)
    return {"since_unix_ns": since, "since_more": since_more, "more": more, **lists}, columns


def series_values(stored: Mapping[str, Any]) -> list[DeviceValue]:
    """Decode the values of one row, given by column name; sorted by name and label.

    Raises ``ValueError`` for a damaged row.
    """
    since = stored.get("since_unix_ns")
    others = _loaded(stored.get("since_more"))
    found = []
    for column, value in _valued(stored):
        reports = _series_of(column)
        if reports is None or not isinstance(value, (int, float)):
            raise ValueError(f"{column}: no value of a series")
        counter, name, label = reports
        start = others.get(column, since) if counter else 0
        if not isinstance(start, int):
            raise ValueError(f"{column}: the start of its count is missing")
        found.append(DeviceValue(name=name, value=value, label=label, start_unix_ns=start))
    return sorted(found, key=lambda each: (each.name, each.label))


def is_series(column: str) -> bool:
    """Check whether a column of a file holds a series."""
    return column[:2] in ("c.", "g.") and column[2:4] in ("i.", "d.")


def name_of(column: str) -> str:
    """Return the counter name of a series column."""
    return column.split(".", 3)[2]


def _put(target: list[Any], at: int, values: Sequence[float | None]) -> None:
    """Write ``values`` from row ``at`` on.

    Values of another series of the same column are overwritten; a counter that restarts makes such a series.
    """
    there = len(target) - at
    if there <= 0:
        target.extend([None] * -there)
        target.extend(values)
    else:
        target[at:] = [old if value is None else value for old, value in zip(target[at:], values, strict=True)]


def _since(rows: int, series: Sequence[tuple[str, Series]]) -> tuple[list[int | None], list[str | None]]:
    """Return the most common counter start of each row, and the other starts as JSON.

    The JSON has starts by column.
    """
    counters = [(name, each) for name, each in series if each.start_unix_ns]
    starts = {each.start_unix_ns for _, each in counters}
    if len(starts) <= 1:  # the usual case: all counters started together
        return [starts.pop() if starts else None] * rows, [None] * rows
    since: list[int | None] = []
    others: list[str | None] = []
    for at in range(rows):
        there = {name: each.start_unix_ns for name, each in counters if each.values[at] is not None}
        common = Counter(there.values()).most_common(1)[0][0] if there else None
        apart = {name: start for name, start in there.items() if start != common}
        since.append(common)
        others.append(json.dumps(apart) if apart else None)
    return since, others


def _valued(stored: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield from ((name, value) for name, value in stored.items() if value is not None and is_series(name))
    yield from _loaded(stored.get("more")).items()


def _loaded(text: Any) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError("a JSON object was expected")
    return found


def _commonest(counts: Counter[str]) -> list[str]:
    fitting = Counter({name: count for name, count in counts.items() if name == name.lower()})
    return [name for name, _ in fitting.most_common(MAX_SERIES_COLUMNS)]


def _column_of(series: Series) -> str:
    whole = isinstance(next((value for value in series.values if value is not None), None), int)
    return _column_name(series.name, series.label, whole, series.start_unix_ns != 0)


@lru_cache(maxsize=8192)
def _column_name(name: str, label: str, whole: bool, counter: bool) -> str:
    """Return the column name of a series; dots in ``name`` are escaped."""
    escaped = name.replace("%", "%25").replace(".", "%2e")
    return f"{'c' if counter else 'g'}.{'i' if whole else 'd'}.{escaped}{f'.{label}' if label else ''}"


@lru_cache(maxsize=8192)
def _series_of(column: str) -> tuple[bool, str, str] | None:
    """Parse a column name: whether it is a counter, its name, its label."""
    if not is_series(column):
        return None
    kind, _, name, *label = column.split(".", 3)
    return kind == "c", name.replace("%2e", ".").replace("%25", "%"), label[0] if label else ""
