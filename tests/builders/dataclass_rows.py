"""Rows of plain dataclass tables, made by the types of their fields.

No two rows are alike.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FLAT

_IDS = {"trace_id": 16, "request_id": 8, "span_id": 8, "key": 8}


def flat_row(table: Table, which: int, at_unix_ns: int, **given: Any) -> Any:
    """Build one row; ``which`` sets its ids and figures."""
    flat = FLAT[table]
    found: dict[str, Any] = {}
    for place, field in enumerate(fields(flat.row)):
        if field.name in _IDS:
            found[field.name] = (which + 1).to_bytes(_IDS[field.name], "big").hex()
        elif str(field.type).startswith("tuple"):
            found[field.name] = (f"said {which}", "and more")
        elif str(field.type).startswith("bool"):
            found[field.name] = bool((which + place) % 2)
        elif str(field.type).startswith("int"):
            found[field.name] = which * 1000 + place
        elif str(field.type).startswith("float"):
            found[field.name] = which + place / 8
        else:
            found[field.name] = f"{field.name}-{which}"
    found[flat.time] = at_unix_ns
    return flat.row(**(found | given))
