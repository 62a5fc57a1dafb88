"""Define the metrics from the engine's log and its metrics page, in one schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.metrics.registry import MetricDef, by_label
from handrail.records import ProcessEvent, ProcessEventKind, SchemaState
from handrail.records.quantities import QUANTITIES, Quantity, QuantityKind
from handrail_sidecar.sources.engine_log import LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSource

_EXPOSED_EVENTS: Final = (
    ProcessEventKind.RESTARTED,
    ProcessEventKind.HUNG,
    ProcessEventKind.RECOVERED,
    ProcessEventKind.TRANSFERS_STUCK,
    ProcessEventKind.UNREACHABLE,
)


class EventCounts:
    """Counts process events on their way to the exporter."""

    def __init__(self, tell: Callable[[ProcessEvent], None]) -> None:
        self.counts: Counter[ProcessEventKind] = Counter(dict.fromkeys(_EXPOSED_EVENTS, 0))
        self._tell = tell

    def __call__(self, event: ProcessEvent) -> None:
        self.counts[event.kind] += 1
        self._tell(event)


def log_rows(source: LogSource) -> list[MetricDef]:
    """Return the metrics of the log source."""
    prefix = f"{names.METRIC_SIDECAR}_log"
    stats, folded = source.stats, source.folder.stats

    def of_tails(name: str) -> Callable[[], float]:
        return lambda: float(sum(getattr(tail, name) for _, tail in source.tail_stats))

    read: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("lines", "Log lines read", of_tails("lines")),
        ("bytes", "Log bytes read", of_tails("bytes_read")),
        ("skipped_bytes", "Log bytes skipped because reading was too far behind", of_tails("skipped_bytes")),
        ("long_lines", "Log lines cut at 64 KiB", of_tails("long_lines")),
        ("rotations", "Times that another file had the log's name", of_tails("rotations")),
        ("truncations", "Times that the log file began again", of_tails("truncations")),
        ("read_errors", "Times that the source could not read a log file", of_tails("errors")),
        ("clocks_disagree", "Log lines whose own time the source did not use", lambda: stats.clocks_disagree),
        ("faults", "Faults of Handrail while reading a line", lambda: stats.faults),
        ("facts_dropped", "Facts above the rate limit, or not accepted", lambda: folded.dropped),
        ("facts_evicted", "Facts whose repeats no longer count as one", lambda: folded.evicted),
        ("failed_fetches", "Requests whose KV fetch failed according to log lines, each once", lambda: folded.fetches_failed),
        ("recomputed_requests", "Requests computed again after a failed load", lambda: folded.recomputed),
    )
    return [
        *(MetricDef(f"{prefix}_{name}", "counter", text, value) for name, text, value in read),
        MetricDef(f"{prefix}_kv_lines", "counter", "Log lines about KV, by kind", lambda: by_label(folded.lines), ("kind",)),
        MetricDef(
            f"{prefix}_facts",
            "counter",
            "Facts made from these lines; ranks and repeats count once",
            lambda: by_label(folded.facts),
            ("kind",),
        ),
    ]


def engine_rows(source: MetricsSource, events: EventCounts) -> list[MetricDef]:
    """Return the metrics of the engine's metrics page.

    They are the engine's values in our schema, and what the scrapes cost and lose.
    """
    prefix, stats, report = f"{names.METRIC_SIDECAR}_scrape", source.stats, names.METRIC_ENGINE
    failures = dict.fromkeys(("unreachable", "timeout", "status", "too_large"), 0)
    return [
        *(_quantity_row(source, quantity) for quantity in QUANTITIES if quantity.kind is not QuantityKind.HISTOGRAM),
        *_transfer_rows(source),
        MetricDef(f"{report}_up", "gauge", "1 while the last scrape of the engine's page worked", lambda: float(stats.up)),
        MetricDef(
            f"{report}_process_events",
            "counter",
            "Events of the engine's process, from its metrics page",
            lambda: by_label(events.counts),
            ("kind",),
        ),
        MetricDef(
            f"{report}_schema_families",
            "gauge",
            "Metric families that differ from the expected schema",
            lambda: _schema(source),
            ("state",),
        ),
        MetricDef(f"{prefix}s", "counter", "Scrapes of the engine's page", lambda: stats.scrapes),
        MetricDef(
            f"{prefix}_failures",
            "counter",
            "Scrapes that returned no page",
            lambda: by_label({**failures, **stats.failures}),
            ("reason",),
        ),
        MetricDef(f"{prefix}_seconds", "gauge", "Time of the last scrape", lambda: stats.seconds),
        MetricDef(f"{prefix}_page_bytes", "gauge", "Size of the last page", lambda: stats.page_bytes),
        MetricDef(
            f"{prefix}_invalid_values", "counter", "Numbers omitted, by reason", lambda: by_label(stats.invalid), ("reason",)
        ),
        MetricDef(f"{prefix}_malformed_lines", "counter", "Malformed lines", lambda: source.reader.scanner.stats.malformed),
        MetricDef(f"{prefix}_labels_folded", "counter", "Series beyond the bound of labels", lambda: source.reader.labels_folded),
        MetricDef(f"{prefix}_samples_dropped", "counter", "Samples not accepted", lambda: stats.dropped),
        MetricDef(f"{prefix}_resets", "counter", "Counters that restarted", lambda: source.tracks.resets),
        MetricDef(f"{prefix}_faults", "counter", "Faults of Handrail while reading a page", lambda: stats.faults),
    ]


def _quantity_row(source: MetricsSource, quantity: Quantity) -> MetricDef:
    labels = ("engine", quantity.label) if quantity.label else ("engine",)

    def read() -> Mapping[tuple[str, ...], float]:
        if source.reading is None:
            return {}
        return {key[: len(labels)]: value for key, value in source.reading.of(quantity.name).items()}

    kind = "gauge" if quantity.kind is QuantityKind.GAUGE else "counter"
    return MetricDef(f"{names.METRIC_ENGINE}_{quantity.name}", kind, quantity.help, read, labels)  # type: ignore[arg-type]


def _transfer_rows(source: MetricsSource) -> list[MetricDef]:
    """Return the sums in the transfer histograms.

    Bytes over transfers is a size; bytes over busy seconds is one rank's rate; the rate of bytes is what the link carried.
    These are three figures with three names (case D22).
    """

    def read(name: str, *, total: bool) -> Callable[[], Mapping[tuple[str, ...], float]]:
        def now() -> Mapping[tuple[str, ...], float]:
            found = {} if source.reading is None else source.reading.histograms
            values = {(key[1], key[2]): each.total if total else each.count for key, each in found.items() if key[0] == name}
            return {key: value for key, value in values.items() if value is not None}

        return now

    prefix, labels = f"{names.METRIC_ENGINE}_kv", ("engine", "transport")
    bytes_help = "Bytes of finished transfers; their integrity is unknown"
    busy_help = "Time in transfers; overlapping transfers count separately"
    return [
        MetricDef(f"{prefix}_transfers", "counter", "Finished transfers", read("kv_transfer_bytes", total=False), labels),
        MetricDef(f"{prefix}_transferred_bytes", "counter", bytes_help, read("kv_transfer_bytes", total=True), labels),
        MetricDef(f"{prefix}_transfer_busy_seconds", "counter", busy_help, read("kv_transfer_seconds", total=True), labels),
    ]


def _schema(source: MetricsSource) -> Mapping[tuple[str, ...], float]:
    notes = source.report.notes if source.report is not None else ()
    return {(state.value,): float(sum(note.state is state for note in notes)) for state in SchemaState}
