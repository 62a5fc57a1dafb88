"""The board of Handrail itself: its cost, its losses and its lag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail_dashboards.panel import GREEN, ORANGE, RED, Board, PanelQuery, PanelRow, series, stat, table
from handrail_dashboards.query import (
    counted,
    highest,
    increase,
    joined,
    least,
    named,
    own,
    rate,
    renamed,
    role,
    total,
    where,
    worst,
)

_NONE: Final = ((0, GREEN), (0.5, RED))
_SIDECAR: Final = "no sidecar is scraped"
_COLLECTOR: Final = "no collector is scraped"
_LOST_BY_SIDECARS: Final = (
    ("handrail_sidecar_spans_dropped_total", "reason", "spans"),
    ("handrail_sidecar_device_samples_dropped_total", "reason", "GPU and link samples"),
    ("handrail_sidecar_export_rejected_items_total", "", "refused by the collector"),
    ("handrail_sidecar_plugin_lost_events_total", "", "plugin: events in the engine"),
    ("handrail_sidecar_plugin_lost_datagrams_total", "", "plugin: datagrams"),
    ("handrail_sidecar_plugin_evicted_total", "kind", "plugin: too many open"),
    ("handrail_sidecar_scrape_samples_dropped_total", "", "engine samples"),
    ("handrail_sidecar_links_samples_dropped_total", "", "link samples"),
)
_LOST_BY_COLLECTORS: Final = (
    ("handrail_collector_rejected_items_total", "", "refused: bad ids"),
    ("handrail_collector_unreadable_spans_total", "", "spans that could not be read"),
    ("handrail_collector_faults_total", "", "left out: a fault of ours"),
)


def _lost(grown: Callable[[str], str], *counters: tuple[str, str, str]) -> str:
    """Return one series for each counter that grew, labelled ``what`` and ``why``.

    ``grown`` returns by how much the series of a name grew.
    """
    found = []
    for name, label, what in counters:
        lost = total(grown(name), *filter(None, (label,))) + " > 0"
        found.append(named(total(renamed(lost, label, "why"), "why") if label else lost, "what", what))
    return " or ".join(found)


def _sum(grown: Callable[[str], str], *counters: tuple[str, str, str]) -> str:
    """Return the sum of all counters.

    Some exist only with a source, so an absent counter counts as 0.
    """
    return " + ".join(f"({total(grown(name))} or vector(0))" for name, _, _ in counters)


def _by_sidecars(name: str) -> str:
    return counted(own(name))


def _by_collectors(name: str) -> str:
    return increase(joined(name))


BOARD: Final = Board(
    "handrail",
    "Handrail / Itself",
    "The cost of sidecars and collectors, their losses and their lag: how far the other boards can be trusted.",
    (
        PanelRow(
            "Can the other boards be trusted?",
            (
                stat(
                    "Sidecars",
                    "Sidecars that are scraped.",
                    "none",
                    f"count({role('handrail_sidecar_info')})",
                    decimals=0,
                    no_value=_SIDECAR,
                    width=3,
                ),
                stat(
                    "Not delivering",
                    "Sidecars whose last delivery failed. They spool, and drop the oldest evidence only when the spool is full.",
                    "none",
                    f"count({own('handrail_sidecar_export_up')} == 0) or 0 * count({own('handrail_sidecar_export_up')})",
                    decimals=0,
                    steps=_NONE,
                    no_value=_SIDECAR,
                    width=3,
                ),
                stat(
                    "Sidecars lost",
                    "Evidence that sidecars did not deliver in this time range, all causes together; the bars below "
                    "show the causes.",
                    "none",
                    where(_sum(_by_sidecars, *_LOST_BY_SIDECARS), own("handrail_sidecar_info")),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    no_value=_SIDECAR,
                    width=3,
                ),
                stat(
                    "Unused",
                    "Evidence that collectors accepted and could not use in this time range.",
                    "none",
                    where(_sum(_by_collectors, *_LOST_BY_COLLECTORS), joined("handrail_collector_info")),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    no_value=_COLLECTOR,
                    width=3,
                ),
                stat(
                    "Refused",
                    "How often a collector told a sender to retry later, since its journal is full. Nothing is lost as "
                    "long as spools have room.",
                    "none",
                    total(increase(joined("handrail_collector_refused_requests_total"))),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, ORANGE)),
                    no_value=_COLLECTOR,
                    width=3,
                ),
                stat(
                    "Journal lag",
                    "Age of the oldest entry that a collector has journalled and not yet joined. The joined figures are"
                    " at least that old.",
                    "s",
                    worst(joined("handrail_collector_journal_lag_seconds")),
                    steps=((0, GREEN), (30, ORANGE), (300, RED)),
                    no_value=_COLLECTOR,
                    width=3,
                ),
                stat(
                    "Clock bound",
                    "Width of the bound of two hosts' clock offset, for the widest pair. Times across those hosts are "
                    "no more exact than this.",
                    "s",
                    worst(joined("handrail_clock_bound_seconds")),
                    steps=((0, GREEN), (0.05, ORANGE), (1, RED)),
                    no_value="no pair of hosts is known",
                    width=3,
                ),
                stat(
                    "Coverage",
                    "Share of counted requests that were joined completely. With several collectors, the lowest share.",
                    "percentunit",
                    least(joined("handrail_trace_coverage_ratio")),
                    no_value="not known",
                    steps=((0, RED), (0.9, ORANGE), (0.99, GREEN)),
                    high=1,
                    width=3,
                ),
            ),
        ),
        PanelRow(
            "What it costs",
            (
                series(
                    "Sidecars: cores in use",
                    "Cores in use, the sidecars with most. docs/overhead.md has the cost of the plugin in the engine, "
                    "which is measured and not scraped.",
                    "none",
                    PanelQuery(highest(rate(own("handrail_sidecar_cpu_seconds_total"))), "{{instance}}"),
                    low=0,
                    no_value=_SIDECAR,
                ),
                series(
                    "Collectors: cores in use",
                    "Cores that each collector uses.",
                    "none",
                    PanelQuery(rate(joined("handrail_collector_cpu_seconds_total")), "{{instance}}"),
                    low=0,
                    no_value=_COLLECTOR,
                ),
                series(
                    "Sidecars: memory",
                    "Resident memory, the sidecars with most.",
                    "bytes",
                    PanelQuery(highest(own("handrail_sidecar_resident_memory_bytes")), "{{instance}}"),
                    low=0,
                    no_value=_SIDECAR,
                ),
                series(
                    "Event loop pauses of sidecars",
                    "Share of time in which a sidecar's event loop paused for 20 ms or more. The sidecar's timestamps "
                    "are late during a pause.",
                    "percentunit",
                    PanelQuery(highest(rate(own("handrail_sidecar_pause_seconds_total"))), "{{instance}}"),
                    low=0,
                    no_value=_SIDECAR,
                ),
                series(
                    "NVML calls and scrapes, the slowest",
                    "Seconds spent in driver calls a second (not processor time), and how long the last scrape of the "
                    "engine's page took.",
                    "s",
                    PanelQuery(
                        worst(total(rate(own("handrail_sidecar_gpu_call_seconds_total")), "instance")), "NVML, of a second"
                    ),
                    PanelQuery(worst(own("handrail_sidecar_scrape_seconds")), "scrape of an engine's page"),
                    low=0,
                    no_value="nothing is sampled",
                ),
                table(
                    "Versions",
                    "How many sidecars of each role run which version.",
                    {"role": "Role", "version": "Version"},
                    PanelQuery(f"count by (role, version) ({role('handrail_sidecar_info')})", "Sidecars", unit="none"),
                    no_value=_SIDECAR,
                ),
            ),
        ),
        PanelRow(
            "What it loses",
            (
                table(
                    "Sidecars: lost in this time range",
                    "Lost evidence by kind and cause, as the scraped sidecars count it.",
                    {"what": "What", "why": "Why"},
                    PanelQuery(_lost(_by_sidecars, *_LOST_BY_SIDECARS), "Lost", unit="none", steps=((0, ORANGE),)),
                    sort="-Lost",
                    no_value="no loss is counted",
                ),
                table(
                    "Collectors: not used in this time range",
                    "Unused evidence by kind and cause.",
                    {"what": "What", "why": "Why"},
                    PanelQuery(_lost(_by_collectors, *_LOST_BY_COLLECTORS), "Lost", unit="none", steps=((0, ORANGE),)),
                    sort="-Lost",
                    no_value="nothing unused is counted",
                ),
                table(
                    "Findings of this time range",
                    "Problems of requests or of their evidence that the collector found by joining.",
                    {"kind": "Finding"},
                    PanelQuery(
                        total(increase(joined("handrail_findings_total")), "kind") + " > 0",
                        "Requests",
                        unit="none",
                        steps=((0, ORANGE),),
                    ),
                    sort="-Requests",
                    no_value="no finding is counted",
                ),
            ),
        ),
        PanelRow(
            "How far behind it is",
            (
                series(
                    "Sidecars behind",
                    "Age of the oldest batch that the collector has not acknowledged. If it grows, the collector is "
                    "away or too slow.",
                    "s",
                    PanelQuery(highest(own("handrail_sidecar_export_lag_seconds")), "{{instance}}"),
                    low=0,
                    no_value=_SIDECAR,
                ),
                series(
                    "Collectors behind",
                    "Age of the oldest journalled entry that is not processed yet. An open request is no lag: it is "
                    "held until it ends.",
                    "s",
                    PanelQuery(joined("handrail_collector_journal_lag_seconds"), "{{instance}}"),
                    low=0,
                    no_value=_COLLECTOR,
                ),
                series(
                    "Joined",
                    "Spans that collectors accepted and request rows that they published, a second.",
                    "cps",
                    PanelQuery(total(rate(joined("handrail_collector_spans_total"))), "spans"),
                    PanelQuery(total(rate(joined("handrail_collector_rows_total"))), "request rows"),
                    low=0,
                    no_value=_COLLECTOR,
                ),
                series(
                    "Joins by how they were made",
                    "Evidence joined to requests a second, by kind (docs/wire.md lists the strongest first). ambiguous:"
                    " it fitted several requests and was joined to none.",
                    "cps",
                    PanelQuery(total(rate(joined("handrail_collector_joins_total")), "how"), "{{how}}"),
                    PanelQuery(total(rate(joined("handrail_collector_ambiguous_joins_total"))), "ambiguous, not joined"),
                    low=0,
                    no_value=_COLLECTOR,
                    colours={"ambiguous, not joined": RED},
                ),
                series(
                    "Clock bounds",
                    "Bounds of the clock offset of pairs of hosts, the widest pairs. A pair whose bound widens has no "
                    "recent hand-offs that bound it.",
                    "s",
                    PanelQuery(highest(joined("handrail_clock_bound_seconds")), "{{host}} and {{peer_host}}"),
                    low=0,
                    no_value="no pair of hosts is known",
                ),
                series(
                    "Store",
                    "Bytes of the store's files and of the journal.",
                    "decbytes",
                    PanelQuery(joined("handrail_collector_store_bytes"), "{{instance}} store"),
                    PanelQuery(joined("handrail_collector_journal_size_bytes"), "{{instance}} journal"),
                    low=0,
                    no_value=_COLLECTOR,
                ),
            ),
        ),
    ),
)
