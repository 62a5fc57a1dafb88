"""What the sidecar says on /metrics of the engine's log and of the engine's own metrics page, in one schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.families.schema import QUANTITIES, Kind, Quantity
from handrail.records import ProcessEvent, ProcessEventKind, SchemaState
from handrail.selfmetrics import Row, by_label
from handrail.sources.log import LogSource
from handrail.sources.metrics import MetricsSource

_SAID: Final = (
    ProcessEventKind.RESTARTED,
    ProcessEventKind.HUNG,
    ProcessEventKind.RECOVERED,
    ProcessEventKind.TRANSFERS_STUCK,
    ProcessEventKind.UNREACHABLE,
)


class EventCounts:
    """Counts process events on their way to the exporter."""

    def __init__(self, tell: Callable[[ProcessEvent], None]) -> None:
        self.counts: Counter[ProcessEventKind] = Counter(dict.fromkeys(_SAID, 0))
        self._tell = tell

    def __call__(self, event: ProcessEvent) -> None:
        self.counts[event.kind] += 1
        self._tell(event)


def log_rows(source: LogSource) -> list[Row]:
    """Rows of the log tap."""
    prefix = f"{names.METRIC_SIDECAR}_log"
    stats, folded = source.stats, source.folder.stats

    def of_tails(name: str) -> Callable[[], float]:
        return lambda: float(sum(getattr(tail, name) for _, tail in source.tail_stats))

    read: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("lines", "Lines read", of_tails("lines")),
        ("bytes", "Bytes read", of_tails("bytes_read")),
        ("skipped_bytes", "Bytes not read: too far behind", of_tails("skipped_bytes")),
        ("long_lines", "Lines cut at 64 KiB", of_tails("long_lines")),
        ("rotations", "Times another file stood under the name", of_tails("rotations")),
        ("truncations", "Times the file began again", of_tails("truncations")),
        ("read_errors", "Times a file could not be read", of_tails("errors")),
        ("clocks_disagree", "Lines whose own time was not believed", lambda: stats.clocks_disagree),
        ("faults", "Faults of ours while reading a line", lambda: stats.faults),
        ("facts_dropped", "Facts above the rate cap or not taken over", lambda: folded.dropped),
        ("facts_evicted", "Facts whose repeats are no longer folded", lambda: folded.evicted),
        ("failed_fetches", "Requests whose KV fetch failed, by their lines, each once", lambda: folded.fetches_failed),
        ("recomputed_requests", "Requests computed again after a failed load", lambda: folded.recomputed),
    )
    return [
        *(Row(f"{prefix}_{name}", "counter", text, value) for name, text, value in read),
        Row(f"{prefix}_kv_lines", "counter", "Lines about KV by what they say", lambda: by_label(folded.lines), ("kind",)),
        Row(
            f"{prefix}_facts",
            "counter",
            "Facts made of them, ranks and repeats folded",
            lambda: by_label(folded.facts),
            ("kind",),
        ),
    ]


def engine_rows(source: MetricsSource, events: EventCounts) -> list[Row]:
    """Rows of the metrics tap: the engine in our schema, and what scraping it costs and loses."""
    prefix, stats, report = f"{names.METRIC_SIDECAR}_scrape", source.stats, names.METRIC_ENGINE
    failures = dict.fromkeys(("unreachable", "timeout", "status", "too_large"), 0)
    return [
        *(_quantity_row(source, quantity) for quantity in QUANTITIES if quantity.kind is not Kind.HISTOGRAM),
        *_transfer_rows(source),
        Row(f"{report}_up", "gauge", "1 while the last scrape of the engine's page worked", lambda: float(stats.up)),
        Row(
            f"{report}_process_events",
            "counter",
            "What its metrics said of the process",
            lambda: by_label(events.counts),
            ("kind",),
        ),
        Row(
            f"{report}_schema_families",
            "gauge",
            "Families that differ from what is expected",
            lambda: _schema(source),
            ("state",),
        ),
        Row(f"{prefix}s", "counter", "Scrapes of the engine's page", lambda: stats.scrapes),
        Row(
            f"{prefix}_failures",
            "counter",
            "Scrapes without a page",
            lambda: by_label({**failures, **stats.failures}),
            ("reason",),
        ),
        Row(f"{prefix}_seconds", "gauge", "Time of the last scrape", lambda: stats.seconds),
        Row(f"{prefix}_page_bytes", "gauge", "Size of the last page", lambda: stats.page_bytes),
        Row(f"{prefix}_invalid_values", "counter", "Numbers left out, by reason", lambda: by_label(stats.invalid), ("reason",)),
        Row(f"{prefix}_malformed_lines", "counter", "Lines that are none", lambda: source.reader.scanner.stats.malformed),
        Row(f"{prefix}_labels_folded", "counter", "Series above the bound of labels", lambda: source.reader.labels_folded),
        Row(f"{prefix}_samples_dropped", "counter", "Samples not taken over", lambda: stats.dropped),
        Row(f"{prefix}_resets", "counter", "Counters that began again", lambda: source.tracks.resets),
        Row(f"{prefix}_faults", "counter", "Faults of ours while reading a page", lambda: stats.faults),
    ]


def _quantity_row(source: MetricsSource, quantity: Quantity) -> Row:
    labels = ("engine", quantity.label) if quantity.label else ("engine",)

    def read() -> Mapping[tuple[str, ...], float]:
        if source.reading is None:
            return {}
        return {key[: len(labels)]: value for key, value in source.reading.of(quantity.name).items()}

    kind = "gauge" if quantity.kind is Kind.GAUGE else "counter"
    return Row(f"{names.METRIC_ENGINE}_{quantity.name}", kind, quantity.help, read, labels)  # type: ignore[arg-type]


def _transfer_rows(source: MetricsSource) -> list[Row]:
    """The sums inside the transfer histograms.

    Bytes over transfers is a size, bytes over busy seconds one rank's rate, the rate of bytes what the link carried: three
    figures with three names (case D22).
    """

    def read(name: str, *, total: bool) -> Callable[[], Mapping[tuple[str, ...], float]]:
        def now() -> Mapping[tuple[str, ...], float]:
            found = {} if source.reading is None else source.reading.histograms
            values = {(key[1], key[2]): each.total if total else each.count for key, each in found.items() if key[0] == name}
            return {key: value for key, value in values.items() if value is not None}

        return now

    prefix, labels = f"{names.METRIC_ENGINE}_kv", ("engine", "transport")
    bytes_help = "Bytes of finished transfers; that they arrived whole is not known"
    busy_help = "Time in transfers, summed over transfers that overlap"
    return [
        Row(f"{prefix}_transfers", "counter", "Finished transfers", read("kv_transfer_bytes", total=False), labels),
        Row(f"{prefix}_transferred_bytes", "counter", bytes_help, read("kv_transfer_bytes", total=True), labels),
        Row(f"{prefix}_transfer_busy_seconds", "counter", busy_help, read("kv_transfer_seconds", total=True), labels),
    ]


def _schema(source: MetricsSource) -> Mapping[tuple[str, ...], float]:
    notes = source.report.notes if source.report is not None else ()
    return {(state.value,): float(sum(note.state is state for note in notes)) for state in SchemaState}
