"""The unit of a metric, which its name ends with: in UCUM, as OTLP has it."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (
    ("_bytes_per_second", "By/s"),
    ("_seconds", "s"),
    ("_bytes", "By"),
    ("_ratio", "1"),
    ("_joules", "J"),
    ("_watts", "W"),
    ("_celsius", "Cel"),
    ("_hertz", "Hz"),
)


def unit_of(name: str) -> str:
    """'' for what is only counted. ``name`` is without ``_total``."""
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")
