"""Find the table row of a family's name, whichever unit the name has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from handrail.records.quantities import BY_NAME, QuantityKind
from handrail_sidecar.engine_metrics import other_engines, vllm
from handrail_sidecar.engine_metrics.family import Family

ROWS: Final = (*vllm.ROWS, *other_engines.ROWS)
"""Every row; for one quantity the preferred names come first."""


class SamplePart(str, Enum):
    """Part of a family that one sample is."""

    VALUE = "value"
    BUCKET = "bucket"
    SUM = "sum"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """A row, its rank (lower is preferred), and the part that a sample's name is."""

    family: Family
    rank: int
    part: SamplePart
    converted: bool = False  # the unit differs from the row's


_UNITS: Final = {
    "seconds": ("time", 1.0),
    "milliseconds": ("time", 1e-3),
    "ms": ("time", 1e-3),
    "microseconds": ("time", 1e-6),
    "us": ("time", 1e-6),
    "ns": ("time", 1e-9),
    "bytes": ("size", 1.0),
    "kb": ("size", 2.0**10),
    "mb": ("size", 2.0**20),
    "gb": ("size", 2.0**30),
    "perc": ("ratio", 1.0),  # vLLM's: a ratio despite its name
    "ratio": ("ratio", 1.0),
    "percent": ("ratio", 1e-2),
}


def split_unit(name: str) -> tuple[str, str, bool]:
    """Split a family's name into (stem, unit, whether it ended in ``_total``).

    The unit is '' when the name has none.
    """
    body = name.removesuffix("_total")
    stem, _, last = body.rpartition("_")
    return (stem, last, body != name) if stem and last in _UNITS else (body, "", body != name)


_BY_FAMILY: Final = {row.name: (row, rank) for rank, row in enumerate(ROWS)}
_BY_STEM: Final = {
    (split_unit(row.name)[0], split_unit(row.name)[2]): (row, rank) for rank, row in enumerate(ROWS) if split_unit(row.name)[1]
}


def family_row(name: str) -> tuple[Family, int, bool] | None:
    """Return the row of a family, its rank, and whether its unit is another one.

    When the unit differs, the returned row has the scale of that unit.
    """
    if (known := _BY_FAMILY.get(name)) is not None:
        return *known, False
    stem, unit, total = split_unit(name)
    other = _BY_STEM.get((stem, total)) if unit else None
    if other is None:
        return None
    row, rank = other
    dimension, scale = _UNITS[unit]
    own_dimension, own_scale = _UNITS[split_unit(row.name)[1]]
    if dimension != own_dimension:
        return None
    return replace(row, name=name, scale=row.scale * scale / own_scale), rank, True


def find(name: str) -> FamilyMatch | None:
    """Return the row and part of a sample of this name; None when it is not wanted."""
    for suffix, part in (
        ("", SamplePart.VALUE),
        ("_bucket", SamplePart.BUCKET),
        ("_sum", SamplePart.SUM),
        ("_count", SamplePart.COUNT),
    ):
        if suffix and not name.endswith(suffix):
            continue
        row = family_row(name.removesuffix(suffix))
        if row is None:
            continue
        family, rank, converted = row
        if (BY_NAME[family.quantity].kind is QuantityKind.HISTOGRAM) == (part is not SamplePart.VALUE):
            return FamilyMatch(family, rank, part, converted)
    return None
