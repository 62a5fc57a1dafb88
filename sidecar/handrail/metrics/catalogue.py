"""Catalogue of every metric, made from the rows that expose it.

docs/metrics.md is made from it, and it serves to check that the names in a query exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from handrail.metrics.registry import AnyMetricDef, HistogramDef, unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueMetric:
    """One metric.

    ``name`` is as PromQL names it (a histogram's without its suffixes); ``unit`` is UCUM, '' for a count.
    ``born``: its series exist from the process's start, counters at 0; others appear with their first value.
    """

    name: str
    type: str  # counter | gauge | histogram
    labels: tuple[str, ...]
    unit: str
    help: str
    process: str
    born: bool

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in PromQL."""
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count")) if self.type == "histogram" else (self.name,)


def metrics_of(rows: Iterable[AnyMetricDef], process: str) -> list[CatalogueMetric]:
    """Metrics of rows whose parts hold no values yet."""
    found = []
    for row in rows:
        kind = "histogram" if isinstance(row, HistogramDef) else row.kind
        value = row.read()
        found.append(
            CatalogueMetric(
                name=f"{row.name}_total" if kind == "counter" else row.name,
                type=kind,
                labels=row.labels,
                unit=unit_of(row.name),
                help=row.help,
                process=process,
                born=isinstance(value, int | float) or bool(value),
            )
        )
    return found
