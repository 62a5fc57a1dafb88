"""Define the metrics of the plugin's source: what is open, and what was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from handrail import conventions as names
from handrail.metrics.histogram import BYTES_BOUND, LATENCY, LATENCY_BOUND, SIZE
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef, by_label
from handrail_sidecar.plugin_merge.bounds import Bounded
from handrail_sidecar.sources.plugin_socket import PluginSource

_SECONDS: Final = 1e-9


def plugin_rows(source: PluginSource, hung_ns: int, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> list[AnyMetricDef]:
    """Return the metrics of the plugin for ``Registry``.

    ``hung_ns``: a KV fetch that is open for longer is hung.
    """
    prefix = f"{names.METRIC_SIDECAR}_plugin"
    merge, stats = source.merge, source.stats
    evicted: dict[str, Bounded[Any]] = {
        "request": merge.requests.open,
        "fetch": merge.fetches.open,
        "publish": merge.publishes.open,
    }
    return [
        MetricDef(f"{prefix}_datagrams", "counter", "Datagrams from the plugin", lambda: stats.datagrams),
        MetricDef(f"{prefix}_bad_datagrams", "counter", "Datagrams that the plugin did not send", lambda: stats.bad_datagrams),
        MetricDef(
            f"{prefix}_displaced_stamps",
            "counter",
            "Impossible times from the plugin (future, over a day old, another wall clock), bounded by their arrival",
            lambda: by_label(source.stamps.displaced),
            ("reason",),
        ),
        MetricDef(f"{prefix}_events", "counter", "Events from the plugin", lambda: merge.stats.events),
        MetricDef(
            f"{prefix}_unread_events", "counter", "Events that the sidecar could not read", lambda: merge.stats.unread_events
        ),
        MetricDef(
            f"{prefix}_lost_events",
            "counter",
            "Events that the plugin dropped inside the engine",
            lambda: merge.processes.lost_events,
        ),
        MetricDef(f"{prefix}_lost_datagrams", "counter", "Datagrams that did not arrive", lambda: merge.processes.lost_datagrams),
        MetricDef(f"{prefix}_records", "counter", "Records made from the plugin's events", lambda: stats.records),
        MetricDef(f"{prefix}_hook_failures", "counter", "Failures of hooks inside the engine", lambda: merge.stats.hook_failures),
        MetricDef(f"{prefix}_lines", "counter", "Log lines from the plugin", lambda: merge.stats.lines),
        MetricDef(
            f"{prefix}_unmatched",
            "counter",
            "Events about something whose beginning is missing",
            lambda: by_label(
                {
                    "request": merge.requests.unmatched,
                    "fetch": merge.fetches.orphans,
                    "publish": merge.publishes.orphans + merge.publishes.late_reads_of_unknown,
                }
            ),
            ("kind",),
        ),
        MetricDef(
            f"{prefix}_evicted",
            "counter",
            "Open records dropped because there were too many",
            lambda: by_label({kind: held.evicted for kind, held in evicted.items()}),
            ("kind",),
        ),
        MetricDef(f"{prefix}_processes", "gauge", "Engine processes that send", lambda: len(merge.processes.alive)),
        MetricDef(
            f"{names.METRIC_KV}_fetches",
            "counter",
            "KV fetches that ended, as the consumer reports them; reason: the engine's failure type",
            lambda: {key: float(count) for key, count in source.hand_offs.fetches.items()},
            ("outcome", "reason"),
            lambda: source.hand_offs.last,
        ),
        *_peer_rows(source),
        MetricDef(
            f"{names.METRIC_KV}_fetched_bytes",
            "counter",
            "KV bytes of fetches that ended",
            lambda: source.hand_offs.bytes_fetched,
        ),
        MetricDef(
            f"{names.METRIC_KV}_publishes",
            "counter",
            "Publishes of KV for a peer, by end; a stale_read was counted as expired before",
            lambda: by_label(source.hand_offs.publishes),
            ("end",),
        ),
        *_fetch_rows(source, hung_ns, monotonic_ns),
        MetricDef(
            f"{names.METRIC_KV}_pinned_bytes",
            "gauge",
            "KV bytes kept for a peer that has not read them yet",
            lambda: merge.publishes.pinned(monotonic_ns())[0],
        ),
        MetricDef(
            f"{names.METRIC_KV}_pinned_oldest_age_seconds",
            "gauge",
            "Age of the oldest KV kept for a peer",
            lambda: merge.publishes.pinned(monotonic_ns())[1] * _SECONDS,
        ),
    ]


def _fetch_rows(source: PluginSource, hung_ns: int, monotonic_ns: Callable[[], int]) -> list[AnyMetricDef]:
    """Return the durations of finished KV fetches and the ages of open ones."""
    tally, prefix = source.hand_offs, f"{names.METRIC_KV}_fetch"

    def ages_ns() -> list[int]:
        return source.merge.fetches.ages_ns(monotonic_ns())

    return [
        HistogramDef(
            f"{prefix}_seconds",
            "Time of one KV transfer, from its post until the last rank has it, as the consumer reports it; a transfer that "
            f"never arrives has no such time. {LATENCY_BOUND}",
            lambda: tally.seconds,
            LATENCY,
            ("outcome",),
        ),
        HistogramDef(
            f"{prefix}_wait_seconds",
            f"Time from when the scheduler knew of a KV fetch until its post: blocks, slot, handshake. {LATENCY_BOUND}",
            lambda: {(): tally.waits},
            LATENCY,
        ),
        HistogramDef(f"{prefix}_bytes", f"KV bytes of one fetch. {BYTES_BOUND}", lambda: {(): tally.sizes}, SIZE),
        MetricDef(f"{prefix}es_open", "gauge", "Open KV fetches", lambda: float(len(ages_ns()))),
        MetricDef(
            f"{prefix}es_hung",
            "gauge",
            "KV fetches that are open for longer than kv_hung_after",
            lambda: float(sum(age_ns >= hung_ns for age_ns in ages_ns())),
        ),
        MetricDef(
            f"{prefix}_oldest_age_seconds",
            "gauge",
            "Age of the oldest open KV fetch; 0 if none is open",
            lambda: max(ages_ns(), default=0) * _SECONDS,
        ),
    ]


def _peer_rows(source: PluginSource) -> list[MetricDef]:
    """Return the metrics by peer that KV came from.

    A peer has the name of its side channel, as the plugin reports it. The number of peers is bounded.
    """
    peers = source.peers.peers
    return [
        MetricDef(
            f"{names.METRIC_LINK}_fetches",
            "counter",
            "KV fetches that ended, by peer and outcome",
            lambda: {(name, word): float(n) for name, peer in peers.items() for word, n in peer.fetches.items()},
            ("peer", "outcome"),
        ),
        MetricDef(
            f"{names.METRIC_LINK}_fetched_bytes",
            "counter",
            "KV bytes from a peer, of fetches that ended",
            lambda: {(name,): float(peer.bytes_moved) for name, peer in peers.items()},
            ("peer",),
        ),
        MetricDef(
            f"{names.METRIC_LINK}_busy_seconds",
            "counter",
            "Time with a running transfer from a peer; bytes divided by it are the rate while transferring",
            lambda: {(name,): peer.busy_ns * _SECONDS for name, peer in peers.items()},
            ("peer",),
        ),
    ]
