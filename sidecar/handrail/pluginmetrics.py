"""What the sidecar says on /metrics of the plugin's source: what is open now, and what was lost on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from handrail import conventions as names
from handrail.buckets import BYTES_BOUND, LATENCY, LATENCY_BOUND, SIZE
from handrail.selfmetrics import AnyRow, HistogramRow, Row, by_label
from handrail.sources.merging.bounds import Bounded
from handrail.sources.plugin import PluginSource

_SECONDS: Final = 1e-9


def plugin_rows(source: PluginSource, hung_ns: int, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> list[AnyRow]:
    """Rows for ``SelfMetrics``. ``hung_ns``: a fetch that is open for longer is hung."""
    prefix = f"{names.METRIC_SIDECAR}_plugin"
    merge, stats = source.merge, source.stats
    evicted: dict[str, Bounded[Any]] = {
        "request": merge.requests.open,
        "fetch": merge.fetches.open,
        "publish": merge.publishes.open,
    }
    return [
        Row(f"{prefix}_datagrams", "counter", "Datagrams received from the plugin", lambda: stats.datagrams),
        Row(f"{prefix}_bad_datagrams", "counter", "Datagrams that were none of the plugin's", lambda: stats.bad_datagrams),
        Row(
            f"{prefix}_displaced_stamps",
            "counter",
            "Times of the plugin that cannot be (future, over a day old, another wall clock), bounded by their arrival",
            lambda: by_label(source.stamps.displaced),
            ("reason",),
        ),
        Row(f"{prefix}_events", "counter", "Events received", lambda: merge.stats.events),
        Row(f"{prefix}_unread_events", "counter", "Events that could not be read", lambda: merge.stats.unread_events),
        Row(
            f"{prefix}_lost_events",
            "counter",
            "Events that the engine's side could not keep",
            lambda: merge.processes.lost_events,
        ),
        Row(f"{prefix}_lost_datagrams", "counter", "Datagrams that did not arrive", lambda: merge.processes.lost_datagrams),
        Row(f"{prefix}_records", "counter", "Records made", lambda: stats.records),
        Row(f"{prefix}_hook_failures", "counter", "Failures of hooks inside the engine", lambda: merge.stats.hook_failures),
        Row(f"{prefix}_lines", "counter", "Log lines of the engine received", lambda: merge.stats.lines),
        Row(
            f"{prefix}_unmatched",
            "counter",
            "What was said of something whose beginning was not heard",
            lambda: by_label(
                {
                    "request": merge.requests.unmatched,
                    "fetch": merge.fetches.orphans,
                    "publish": merge.publishes.orphans + merge.publishes.late_reads_of_unknown,
                }
            ),
            ("kind",),
        ),
        Row(
            f"{prefix}_evicted",
            "counter",
            "Given up because too many were open",
            lambda: by_label({kind: held.evicted for kind, held in evicted.items()}),
            ("kind",),
        ),
        Row(f"{prefix}_processes", "gauge", "Engine processes that speak", lambda: len(merge.processes.alive)),
        Row(
            f"{names.METRIC_KV}_fetches",
            "counter",
            "KV fetches that ended, as the receiving engine tells it; reason: the engine's failure type",
            lambda: {key: float(count) for key, count in source.hand_offs.fetches.items()},
            ("outcome", "reason"),
            lambda: source.hand_offs.last,
        ),
        *_peer_rows(source),
        Row(
            f"{names.METRIC_KV}_fetched_bytes",
            "counter",
            "KV moved by fetches that ended",
            lambda: source.hand_offs.bytes_fetched,
        ),
        Row(
            f"{names.METRIC_KV}_publishes",
            "counter",
            "KV kept for a peer, by how that ended; a stale_read has been counted as expired before",
            lambda: by_label(source.hand_offs.publishes),
            ("end",),
        ),
        *_fetch_rows(source, hung_ns, monotonic_ns),
        Row(
            f"{names.METRIC_KV}_pinned_bytes",
            "gauge",
            "KV kept for a peer that has not read it yet",
            lambda: merge.publishes.pinned(monotonic_ns())[0],
        ),
        Row(
            f"{names.METRIC_KV}_pinned_oldest_age_seconds",
            "gauge",
            "Age of the oldest KV kept for a peer",
            lambda: merge.publishes.pinned(monotonic_ns())[1] * _SECONDS,
        ),
    ]


def _fetch_rows(source: PluginSource, hung_ns: int, monotonic_ns: Callable[[], int]) -> list[AnyRow]:
    """Of fetches that have ended, how long they took; of open ones, for how long they have been."""
    tally, prefix = source.hand_offs, f"{names.METRIC_KV}_fetch"

    def ages_ns() -> list[int]:
        return source.merge.fetches.ages_ns(monotonic_ns())

    return [
        HistogramRow(
            f"{prefix}_seconds",
            "Transfer of one KV fetch, from its post until the last rank had it, as the receiving engine tells; one that never "
            f"arrived has no such time. {LATENCY_BOUND}",
            lambda: tally.seconds,
            LATENCY,
            ("outcome",),
        ),
        HistogramRow(
            f"{prefix}_wait_seconds",
            f"From when the scheduler knew of a KV fetch until it was posted: blocks, slot, first contact. {LATENCY_BOUND}",
            lambda: {(): tally.waits},
            LATENCY,
        ),
        HistogramRow(f"{prefix}_bytes", f"KV moved by one fetch. {BYTES_BOUND}", lambda: {(): tally.sizes}, SIZE),
        Row(f"{prefix}es_open", "gauge", "KV fetches that have not ended", lambda: float(len(ages_ns()))),
        Row(
            f"{prefix}es_hung",
            "gauge",
            "Of these, open for longer than kv_hung_after",
            lambda: float(sum(age_ns >= hung_ns for age_ns in ages_ns())),
        ),
        Row(
            f"{prefix}_oldest_age_seconds",
            "gauge",
            "Age of the oldest open KV fetch; 0 where none is open",
            lambda: max(ages_ns(), default=0) * _SECONDS,
        ),
    ]


def _peer_rows(source: PluginSource) -> list[Row]:
    """By the peer that KV came from, as the plugin names its side channel; the peers are bounded."""
    peers = source.peers.peers
    return [
        Row(
            f"{names.METRIC_LINK}_fetches",
            "counter",
            "KV fetches that ended, by peer and outcome",
            lambda: {(name, word): float(n) for name, peer in peers.items() for word, n in peer.fetches.items()},
            ("peer", "outcome"),
        ),
        Row(
            f"{names.METRIC_LINK}_fetched_bytes",
            "counter",
            "KV moved from a peer by fetches that ended",
            lambda: {(name,): float(peer.bytes_moved) for name, peer in peers.items()},
            ("peer",),
        ),
        Row(
            f"{names.METRIC_LINK}_busy_seconds",
            "counter",
            "Time in which something was being transferred from a peer: bytes over it are the rate while transferring",
            lambda: {(name,): peer.busy_ns * _SECONDS for name, peer in peers.items()},
            ("peer",),
        ),
    ]
