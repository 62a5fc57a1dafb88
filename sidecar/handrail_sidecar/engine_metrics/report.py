"""Compare a metrics page with the table of expected families.

It finds families that are missing, renamed, there under both names, in another unit, or under a name that only looks right.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from handrail.records import SchemaNote, SchemaState
from handrail_sidecar.engine_metrics.family import PREFIXES, Family, emitter_of
from handrail_sidecar.engine_metrics.index import ROWS, family_row

_MOST_NOTES: Final = 64
_ALIKE: Final = 0.88
_OPTIONAL_SUFFIXES: Final = ("_created", "_info")


def schema_notes(families: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[SchemaNote, ...]]:
    """Return (emitters, notes) for the families of a page.

    ``families``: type by name.
    A quantity is missing only when its emitter is there at all: an engine without a KV connector exposes no transfer families,
    and that is not a fault. An empty page gives no emitters and no notes.
    """
    found = {name: row for name in families if (row := family_row(name)) is not None}
    # A family with a TYPE line and no series yet counts as exposed: counters of a fresh engine look like that.
    emitters = tuple(sorted({emitter for name in families if (emitter := emitter_of(name)) and emitter != "process"}))
    notes = [
        *_missing(found, emitters),
        *_older(found),
        *(
            SchemaNote(state=SchemaState.UNIT_CHANGED, quantity=family.quantity, seen=name, expected=ROWS[rank].name)
            for name, (family, rank, converted) in found.items()
            if converted
        ),
        *_alike(families, found),
    ]
    return emitters, tuple(notes[:_MOST_NOTES])


def _missing(found: Mapping[str, tuple[Family, int, bool]], emitters: tuple[str, ...]) -> list[SchemaNote]:
    there = {(ROWS[rank].emitter, ROWS[rank].quantity, ROWS[rank].fixed) for _, rank, _ in found.values()}
    return [
        SchemaNote(state=SchemaState.MISSING, quantity=row.quantity, expected=row.name)
        for row in ROWS
        if row.expected and row.emitter in emitters and (row.emitter, row.quantity, row.fixed) not in there
    ]


def _older(found: Mapping[str, object]) -> list[SchemaNote]:
    """Note names that are not the first of their quantity at their emitter.

    Such a name is there alone or beside the first.
    """
    notes = []
    first: dict[tuple[str, str, str], str] = {}
    for row in ROWS:
        key = (row.emitter, row.quantity, row.fixed)
        preferred = first.setdefault(key, row.name)
        if row.name != preferred and row.name in found:
            state = SchemaState.BOTH if preferred in found else SchemaState.RENAMED
            notes.append(SchemaNote(state=state, quantity=row.quantity, seen=row.name, expected=preferred))
    return notes


def _alike(families: Mapping[str, str], found: Mapping[str, object]) -> list[SchemaNote]:
    """Note unknown families that look much like an expected one that is absent."""
    absent = [row for row in ROWS if row.expected and row.name not in found]
    notes = []
    for name in families:
        if name in found or name.endswith(_OPTIONAL_SUFFIXES) or not name.startswith(tuple(PREFIXES)):
            continue
        near = difflib.get_close_matches(name, [row.name for row in absent if row.emitter == emitter_of(name)], 1, _ALIKE)
        if near:
            quantity = next(row.quantity for row in absent if row.name == near[0])
            notes.append(SchemaNote(state=SchemaState.UNKNOWN, quantity=quantity, seen=name, expected=near[0]))
    return notes
