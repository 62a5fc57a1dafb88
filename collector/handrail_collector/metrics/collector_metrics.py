"""Define the metrics of the collector's own work: progress, cost and losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from handrail import __version__
from handrail import conventions as names
from handrail.identity import JoinKind
from handrail.metrics.registry import MetricDef, by_label
from handrail.otlp.receiver.intake import REPAIRED
from handrail_collector.counters import KEPT, CounterKey
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.pipeline import Pipeline
from handrail_collector.status import Running
from handrail_collector.stitch.group import Closing

KINDS: Final = (("gpu", "nvml"), ("link", "rdma"), ("link", "nic"), ("engine", "metrics"))
"""Kinds and sources of samples that are counted from 0 on."""


def own_rows(running: Running, links: SlowLinks, now_unix_ns: Callable[[], int] = time.time_ns) -> list[MetricDef]:
    """List these metrics."""
    prefix = names.METRIC_COLLECTOR
    taken, kept, pipe = running.receiver.stats, running.journal.stats, running.pipeline.stats
    stitcher, seen = running.pipeline.stitcher, running.pipeline.observed
    forwards, kept_up, pipeline = running.forwards, running.upkeep.stats, running.pipeline
    counters: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("refused_requests", "Export requests refused, to retry later", lambda: taken.requests_refused),
        ("rejected_requests", "Export requests refused finally", lambda: taken.requests_rejected),
        ("rejected_items", "Items refused singly (bad ids)", lambda: taken.items_rejected),
        ("repaired_values", REPAIRED, lambda: taken.values_repaired),
        ("journal_bytes", "Bytes written to the journal", lambda: kept.appended_bytes),
        ("journal_syncs", "Group syncs of the journal", lambda: kept.syncs),
        ("journal_sync_seconds", "Time that the journal spent writing and syncing", lambda: kept.sync_ns / 1e9),
        ("journal_damaged_bytes", "Damaged bytes in the journal", lambda: running.journal.damaged_bytes),
        ("spans", f"Spans read from the journal, without duplicates; {KEPT}", lambda: seen[CounterKey.SPANS]),
        ("spans_stored", f"Spans published to the store; {KEPT}", lambda: seen[CounterKey.SPANS_STORED]),
        (
            "received_own_spans",
            "Spans of Handrail's own work that came in; the collector neither joins nor stores them",
            lambda: pipe.own_spans,
        ),
        ("duplicate_batches", f"Batches that came again; {KEPT}", lambda: seen[CounterKey.DUPLICATE_BATCHES]),
        ("duplicate_spans", f"Spans that came again; {KEPT}", lambda: seen[CounterKey.DUPLICATE_SPANS]),
        ("unreadable_spans", f"Proxy spans that the collector could not read; {KEPT}", lambda: seen[CounterKey.UNREADABLE_SPANS]),
        ("rows", f"Request rows published; each version counts; {KEPT}", lambda: seen[CounterKey.ROWS]),
        (
            "withdrawn_rows",
            f"Rows withdrawn, because their request first appeared in parts; {KEPT}",
            lambda: seen[CounterKey.WITHDRAWN_ROWS],
        ),
        ("undecodable_entries", "Journal entries skipped because of damage on disk", lambda: pipe.undecodable),
        ("publishes", "Publishes to the store", lambda: pipe.publishes),
        ("faults", "Spans, requests or rows omitted because they caused a fault in Handrail", lambda: pipe.faults),
        ("publish_failures", "Failed publishes, which the collector repeats", lambda: pipe.publish_failures),
        (
            "ambiguous_joins",
            f"Evidence that fits several requests and is not joined; {KEPT}",
            lambda: seen[CounterKey.AMBIGUOUS_JOINS],
        ),
        (
            "dropped_links",
            "Foreign spans that parent chains no longer pass through",
            lambda: stitcher.stats.links_dropped,
        ),
        (
            "clock_contradictions",
            f"Contradictions between clocks: a host clock stepped, or a join is wrong; {KEPT}",
            lambda: seen[CounterKey.CLOCK_CONTRADICTIONS],
        ),
        ("store_upkeep_passes", "Maintenance passes over the store", lambda: kept_up.passes),
        ("store_upkeep_failures", "Failed steps of maintenance, which the collector repeats", lambda: kept_up.failures),
        ("store_compacted_files", "Files that compaction merged", lambda: kept_up.files_folded),
        ("store_rollups", "Hourly rollups made for explain", lambda: kept_up.rollups.made),
        ("store_damaged_rollups", "Damaged rollups, which the collector made again", lambda: kept_up.rollups.damaged),
        (
            "store_compacted_rows",
            "Rows that compaction removed: replaced versions, withdrawn rows, repeated spans",
            lambda: kept_up.rows_folded,
        ),
        ("store_compact_seconds", "Time spent compacting", lambda: kept_up.fold_ns / 1e9),
        ("store_rollup_seconds", "Time spent making rollups", lambda: kept_up.rollups.made_ns / 1e9),
        ("store_expired_files", "Files that retention removed from the store", lambda: kept_up.files_expired),
        (
            "store_quota_folders",
            "Folders of a day that left the store early, because the store was over its bound",
            lambda: kept_up.quota_days,
        ),
        ("store_quota_bytes", "Bytes of the days that left the store early", lambda: kept_up.quota_bytes),
        (
            "store_quarantined_files",
            "Files that left the store because the collector set them aside",
            lambda: kept_up.files_set_aside,
        ),
        (
            "store_unlisted_files",
            "Files without a line in the manifest that this start found and set aside",
            lambda: kept_up.files_unlisted,
        ),
        ("store_removed_files", "Files removed from disk after their grace time", lambda: kept_up.files_removed),
        ("link_evaluations", "Passes over the links to find slow ones", lambda: links.looks),
        ("link_look_failures", "Failed passes over the links: slow links are unknown for a minute", lambda: links.failures),
        ("link_look_seconds", "Time of the passes over the links, in a thread of their own", lambda: links.spent_ns / 1e9),
        ("cpu_seconds", "Processor time of this process", time.process_time),
    )
    rows = [MetricDef(f"{prefix}_info", "gauge", "1, with the running version", lambda: {(__version__,): 1.0}, ("version",))]
    rows += [MetricDef(f"{prefix}_{name}", "counter", text, read) for name, text, read in counters]
    rows += [
        MetricDef(
            f"{prefix}_displaced_records",
            "counter",
            "Records with a time over a day after their arrival (future) or 30 days before it (old); they wait by their arrival",
            lambda: by_label(pipe.displaced),
            ("reason",),
        ),
        MetricDef(f"{prefix}_items", "counter", "Items acknowledged", lambda: by_label(taken.items), ("signal",)),
        MetricDef(
            f"{prefix}_joins",
            "counter",
            f"Evidence joined to a request, by how; {KEPT}",
            lambda: by_label(
                dict.fromkeys((k.value for k in JoinKind if k is not JoinKind.OPENED), 0) | seen.by_word(CounterKey.JOINS)
            ),
            ("how",),
        ),
        MetricDef(
            f"{prefix}_decisions",
            "counter",
            f"Rows published, by the reason for the decision; {KEPT}",
            lambda: by_label(dict.fromkeys((closing.value for closing in Closing), 0) | seen.by_word(CounterKey.DECISIONS)),
            ("closing",),
        ),
        MetricDef(
            f"{prefix}_samples",
            "counter",
            f"Samples of GPUs, links and engines read; {KEPT}",
            lambda: _numbers(dict.fromkeys(KINDS, 0) | seen.by_words(CounterKey.SAMPLES, 2)),
            ("kind", "source"),
        ),
        MetricDef(
            f"{prefix}_source_silent_seconds",
            "gauge",
            "Time since a source of this role last sent requests or samples; absent for a source that never sent any",
            lambda: _silent(pipeline, now_unix_ns()),
            ("role", "source"),
        ),
        MetricDef(
            f"{prefix}_oldest_open_request_seconds",
            "gauge",
            "Age of the evidence that waits longest for a decision; a prefill alone may wait an hour for its decode",
            lambda: _age(stitcher.oldest_open_unix_ns(), now_unix_ns()),
        ),
        MetricDef(
            f"{prefix}_unpublished_items",
            "gauge",
            "Rows, spans and samples that wait in memory for the next publish",
            lambda: _numbers(pipeline.unpublished()),
            ("kind",),
        ),
        MetricDef(f"{prefix}_held_requests", "gauge", "Requests in memory, including decided ones", lambda: len(stitcher)),
        MetricDef(
            f"{prefix}_journal_lag_bytes",
            "gauge",
            "Bytes in the journal that the pipeline has not read yet",
            lambda: running.journal.lag_bytes,
        ),
        MetricDef(
            f"{prefix}_journal_lag_seconds",
            "gauge",
            "Age of the oldest journal entry that the pipeline has not read yet",
            lambda: _age(running.journal.untaken_unix_ns, now_unix_ns()),
        ),
        MetricDef(
            f"{prefix}_store_bytes", "gauge", "Bytes of the store's files, as of the last maintenance pass", lambda: kept_up.bytes
        ),
        MetricDef(
            f"{prefix}_store_files",
            "gauge",
            "Number of the store's files, as of the last maintenance pass",
            lambda: kept_up.files,
        ),
        MetricDef(
            f"{prefix}_store_damaged_files",
            "gauge",
            "Files in the manifest that the collector cannot read",
            lambda: kept_up.files_damaged,
        ),
        MetricDef(f"{prefix}_journal_size_bytes", "gauge", "Size of the journal on disk", lambda: running.journal.size_bytes),
        MetricDef(
            f"{prefix}_edge_requests",
            "gauge",  # requests that are joined late move from one label to the other
            f"Requests of an edge, by whether every process on their path sent evidence; {KEPT}",
            lambda: {
                ("true",): float(seen[CounterKey.EDGE_JOINED]),
                ("false",): float(seen[CounterKey.EDGE_REQUESTS] - seen[CounterKey.EDGE_JOINED]),
            },
            ("joined",),
        ),
    ]
    if forwards:
        rows += [
            MetricDef(
                f"{prefix}_forward_queue_bytes",
                "gauge",
                "Bytes that wait to be forwarded",
                lambda: sum(f.queue_bytes for f in forwards),
            ),
            MetricDef(
                f"{prefix}_forwarded_items",
                "counter",
                "Items delivered to forward endpoints",
                lambda: sum(f.stats.delivery.items_sent for f in forwards),
            ),
            MetricDef(
                f"{prefix}_forward_dropped_items",
                "counter",
                "Items not forwarded, by reason",
                lambda: {(str(r.value),): float(sum(f.stats.dropped[r] for f in forwards)) for r in forwards[0].stats.dropped},
                ("reason",),
            ),
        ]
    return rows


def _numbers(counts: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], float]:
    return {labels: float(count) for labels, count in sorted(counts.items())}


def _age(since_unix_ns: int | None, now_unix_ns: int) -> float:
    """Return an age in seconds; 0 when nothing waits."""
    return max(0, now_unix_ns - since_unix_ns) / 1e9 if since_unix_ns is not None else 0.0


def _silent(pipeline: Pipeline, now_unix_ns: int) -> dict[tuple[str, ...], float]:
    last = pipeline.stitcher.last_reported()
    for who, at in pipeline.intake.source_liveness.last_unix_ns.items():
        last[who] = max(at, last.get(who, 0))
    return {(role.value, source): _age(at, now_unix_ns) for (role, source), at in sorted(last.items())}
