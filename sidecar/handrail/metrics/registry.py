"""Prometheus metrics of a process, from a table of rows read at each scrape.

Nothing is counted twice: the parts keep plain integers on their hot paths, and a row here says where one is read. The registry is
its own, so that it exposes no metrics of the process or of another library by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar
from prometheus_client.utils import floatToGoString

from handrail.metrics.histogram import LATENCY, SIZE, Exemplar, Histogram, Layout
from handrail.printable import printable_series

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


_Key = TypeVar("_Key")

Value = float | Mapping[tuple[str, ...], float]
"""One number, or one per label set, keyed by the label values in the row's order."""

_OPEN_METRICS: Final = "application/openmetrics-text"
_EOF: Final = b"# EOF\n"


@dataclass(frozen=True, slots=True)
class MetricDef:
    """One metric.

    ``name`` is in base units and, for a counter, without ``_total``; ``read`` is called at every scrape.
    ``exemplars``: of a counter, the last request that was counted, by label values; exposed where the format has exemplars.
    ``kept``: it goes on over restarts of the process.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[], Value]
    labels: tuple[str, ...] = ()
    exemplars: Callable[[], Mapping[tuple[str, ...], Exemplar]] | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class HistogramDef:
    """One histogram.

    ``read`` gives its series by label values in the order of ``labels``; all have the bounds of ``layout``. ``kept``: as above.
    """

    name: str
    help: str
    read: Callable[[], Mapping[tuple[str, ...], Histogram]]
    layout: Layout
    labels: tuple[str, ...] = ()
    kept: bool = False


AnyMetricDef = MetricDef | HistogramDef


class Registry(Collector):
    """Rows of one process; rows that are added later are on the page too."""

    def __init__(self, rows: Sequence[AnyMetricDef]) -> None:
        self.rows = rows
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Metrics for prometheus_client: all but the histograms."""
        return self._families()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Metrics page in the scraper's format, and its content type.

        Exemplars are on it only where the format has them.
        """
        encoder, content_type = choose_encoder(accept)
        page = encoder(self.registry)
        modern = content_type.startswith(_OPEN_METRICS)
        histograms = "".join(text for row in self.rows if isinstance(row, HistogramDef) for text in _lines(row, exemplars=modern))
        if modern:
            page = page.removesuffix(_EOF) + histograms.encode() + _EOF
        else:
            page += histograms.encode()
        return page, content_type

    def _families(self) -> Iterator[Metric]:
        for row in self.rows:
            if isinstance(row, HistogramDef):
                continue
            make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = make(row.name, row.help, labels=row.labels)
            value = row.read()
            for labels, number in printable_series(value).items() if isinstance(value, Mapping) else (((), value),):
                family.add_metric(labels, finite(number))
            if row.exemplars is not None:
                _point(family, row.labels, printable_series(row.exemplars()))
            yield family


def _point(family: Metric, names: tuple[str, ...], exemplars: Mapping[tuple[str, ...], Exemplar]) -> None:
    """Add the exemplars to a counter's samples."""
    for at, sample in enumerate(family.samples):
        held = exemplars.get(tuple(sample.labels[name] for name in names))
        if held is not None:
            reports = ClientExemplar({"trace_id": held.trace_id}, finite(held.value), held.unix_ns / 1e9)
            family.samples[at] = sample._replace(exemplar=reports)


def finite(number: float) -> float:
    """Number as a float; infinite where it is too large for one.

    A huge whole number in a peer's figures must not break the page.
    """
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _number(value: float) -> str:
    """Number as prometheus_client writes it, so that ``le`` labels match everywhere."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


_BOUNDS: Final = {layout: (*map(_number, layout.bounds), "+Inf") for layout in (LATENCY, SIZE)}


def _lines(row: HistogramDef, *, exemplars: bool) -> Iterator[str]:
    """Yield the family's text, the same in both formats but for exemplars.

    prometheus_client's encoder takes 10 us a line: with 152 buckets a series it would hold up the streams that this process
    passes on for 20 ms and more. Here a line takes a fortieth (tests/bench/bench_live.py).
    """
    yield f"# HELP {row.name} {_escaped(row.help, quotes=exemplars)}\n# TYPE {row.name} histogram\n"
    bounds = _BOUNDS[row.layout]
    for values, histogram in printable_series(row.read()).items():
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(zip(row.labels, values, strict=True)))
        begin = f'{row.name}_bucket{{{labels}{"," if labels else ""}le="'
        running, lines = 0, []
        for bound, count in zip(bounds, histogram.counts, strict=True):
            running += count
            lines.append(f'{begin}{bound}"}} {running}.0\n')
        if exemplars:
            for at, exemplar in histogram.exemplars.items():
                value = _number(finite(exemplar.value) / row.layout.per_unit)
                lines[at] = f'{lines[at][:-1]} # {{trace_id="{exemplar.trace_id}"}} {value} {exemplar.unix_ns / 1e9:.3f}\n'
        braced = f"{{{labels}}}" if labels else ""
        total = _number(finite(histogram.total) / row.layout.per_unit)
        yield f"{''.join(lines)}{row.name}_count{braced} {running}.0\n{row.name}_sum{braced} {total}\n"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def by_label(counts: Mapping[_Key, int]) -> dict[tuple[str, ...], float]:
    """Counts keyed by an enum or a word, as values of a row with one label."""
    return {(str(getattr(key, "value", key)),): float(count) for key, count in counts.items()}
