"""A process's own counters as Prometheus metrics: a table of rows, read from plain integers at the time of the scrape.

Nothing is counted twice: the parts keep plain integers on their hot paths, and a row here says where one is read. Own registry,
so that nothing of the process or of another library is exposed by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

_Key = TypeVar("_Key")

Value = float | Mapping[tuple[str, ...], float]
"""One number, or one a label set, keyed by the label values in the row's order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. ``name`` is in base units and, for a counter, without ``_total``; ``read`` is called at every scrape."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[], Value]
    labels: tuple[str, ...] = ()


class SelfMetrics(Collector):
    """The rows of one process."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        return self._families()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that the scraper asked for, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _families(self) -> Iterator[Metric]:
        for row in self.rows:
            make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = make(row.name, row.help, labels=row.labels)
            value = row.read()
            for labels, number in value.items() if isinstance(value, Mapping) else (((), value),):
                family.add_metric(labels, float(number))
            yield family


def by_label(counts: Mapping[_Key, int]) -> dict[tuple[str, ...], float]:
    """Counts keyed by an enum or a word, as values of a row with one label."""
    return {(str(getattr(key, "value", key)),): float(count) for key, count in counts.items()}
