"""Cases of alerts in few words: the series, and what must fire.

``promtool_files`` makes promtool's own test files of them.
Values are in promtool's notation: ``a+bxN`` is ``a`` and then N more samples, each ``b`` higher; ``axN`` is ``a`` and N more of
it, so N+1 in all; ``_`` is no sample, ``stale`` ends the series. ``0x10`` is eleven zeros, not a hexadecimal number (case H11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of an alert.

    ``fires``: the labels that each instance has beside those of its rule; empty: silent. ``given``: series -> values.
    """

    alert: str
    name: str
    given: Mapping[str, str]
    at: str
    fires: tuple[Mapping[str, str], ...] = ()
    every: str = "15s"  # between samples
    suite: str = ""  # instead of the rule's file: the same rules, evaluated less often


LONG = "long"
"""The suite of the same rules, evaluated every ten minutes.

Every 15 s over days would take too long.
"""

CLUSTER = {"cluster": "eu"}


def series(name: str, **labels: str) -> str:
    """Return a series of the cluster, as an exposition writes it."""
    inside = ",".join(f'{key}="{value}"' for key, value in {**CLUSTER, **labels}.items())
    return f"{name}{{{inside}}}"


def at_decode(name: str, **labels: str) -> str:
    """Return a series of the sidecar beside d0."""
    return series(name, **D0, **labels)


def at_prefill(name: str, **labels: str) -> str:
    """Return a series of the sidecar beside p0."""
    return series(name, **P0, **labels)


def at_edge(name: str, **labels: str) -> str:
    """Return a series of the edge's sidecar."""
    return series(name, **EDGE, **labels)


def at_collector(name: str, **labels: str) -> str:
    """Return a series of the collector."""
    return series(name, **COLLECTOR, **labels)


D0 = {"job": "handrail", "instance": "d0:9464"}
P0 = {"job": "handrail", "instance": "p0:9464"}
EDGE = {"job": "handrail", "instance": "edge:9464"}
COLLECTOR = {"job": "handrail-collector", "instance": "collector:4380"}
