"""Unit of a metric, from the end of its name, in UCUM as OTLP has it."""

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
    """Unit of ``name`` (without ``_total``); '' for a plain count."""
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")
