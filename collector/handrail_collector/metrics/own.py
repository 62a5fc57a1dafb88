"""What the collector says of its own work: how far it is, what it costs, what it lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from handrail import __version__
from handrail import conventions as names
from handrail.identity import JoinKind
from handrail.otlp.intake import REPAIRED
from handrail.selfmetrics import Row, by_label
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.observed import KEPT, Seen
from handrail_collector.pipeline import Pipeline
from handrail_collector.running import Running
from handrail_collector.stitch.group import Closing

KINDS: Final = (("gpu", "nvml"), ("link", "rdma"), ("link", "nic"), ("engine", "metrics"))
"""Samples that are counted from 0 on, as kind and source."""


def own_rows(running: Running, links: SlowLinks, now_unix_ns: Callable[[], int] = time.time_ns) -> list[Row]:
    """All of them."""
    prefix = names.METRIC_COLLECTOR
    taken, kept, pipe = running.receiver.stats, running.journal.stats, running.pipeline.stats
    stitcher, seen = running.pipeline.stitcher, running.pipeline.observed
    forwards, kept_up, pipeline = running.forwards, running.upkeep.stats, running.pipeline
    counters: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("refused_requests", "Export requests told to retry", lambda: taken.requests_refused),
        ("rejected_requests", "Export requests refused for good", lambda: taken.requests_rejected),
        ("rejected_items", "Items refused one by one (bad ids)", lambda: taken.items_rejected),
        ("repaired_values", REPAIRED, lambda: taken.values_repaired),
        ("journal_bytes", "Bytes journalled", lambda: kept.appended_bytes),
        ("journal_syncs", "Group syncs of the journal", lambda: kept.syncs),
        ("journal_sync_seconds", "Time spent writing and syncing", lambda: kept.sync_ns / 1e9),
        ("journal_damaged_bytes", "Journal bytes that hold no record", lambda: running.journal.damaged_bytes),
        ("spans", f"Spans taken from the journal, duplicates not counted; {KEPT}", lambda: seen[Seen.SPANS]),
        ("spans_stored", f"Spans published to the store; {KEPT}", lambda: seen[Seen.SPANS_STORED]),
        ("duplicate_batches", f"Batches delivered again; {KEPT}", lambda: seen[Seen.DUPLICATE_BATCHES]),
        ("duplicate_spans", f"Spans delivered again; {KEPT}", lambda: seen[Seen.DUPLICATE_SPANS]),
        ("unreadable_spans", f"Proxy spans that could not be read; {KEPT}", lambda: seen[Seen.UNREADABLE_SPANS]),
        ("rows", f"Request rows published, each version one; {KEPT}", lambda: seen[Seen.ROWS]),
        ("withdrawn_rows", f"Rows taken back: their request was told in parts; {KEPT}", lambda: seen[Seen.WITHDRAWN_ROWS]),
        ("undecodable_entries", "Journal entries passed over: damage on disk", lambda: pipe.undecodable),
        ("publishes", "Publishes to the store", lambda: pipe.publishes),
        ("faults", "Spans, requests or rows left out because they broke us", lambda: pipe.faults),
        ("publish_failures", "Publishes that failed and are tried again", lambda: pipe.publish_failures),
        (
            "ambiguous_joins",
            f"Evidence that fitted several requests, not joined; {KEPT}",
            lambda: seen[Seen.AMBIGUOUS_JOINS],
        ),
        (
            "dropped_links",
            "Foreign spans that no parent chain is followed through now",
            lambda: stitcher.stats.links_dropped,
        ),
        (
            "clock_contradictions",
            f"Host clocks stepped, or wrong joins; {KEPT}",
            lambda: seen[Seen.CLOCK_CONTRADICTIONS],
        ),
        ("store_upkeep_passes", "Looks at what the store should fold, drop and remove", lambda: kept_up.passes),
        ("store_upkeep_failures", "Steps of these that failed and are tried again", lambda: kept_up.failures),
        ("store_folded_files", "Files that compaction put into one", lambda: kept_up.files_folded),
        ("store_rollups", "Hourly rollups made for explain", lambda: kept_up.rollups.made),
        ("store_damaged_rollups", "Rollups that could not be read and were made again", lambda: kept_up.rollups.damaged),
        (
            "store_folded_rows",
            "Rows that compaction left out: replaced versions, withdrawn rows, spans sent again",
            lambda: kept_up.rows_folded,
        ),
        ("store_fold_seconds", "Time spent compacting", lambda: kept_up.fold_ns / 1e9),
        ("store_rollup_seconds", "Time spent making rollups", lambda: kept_up.rollups.made_ns / 1e9),
        ("store_expired_files", "Files that left the store by retention", lambda: kept_up.files_expired),
        (
            "store_quota_folders",
            "Folders of a day that left the store early because it was over its bound",
            lambda: kept_up.quota_days,
        ),
        ("store_quota_bytes", "Bytes of these days", lambda: kept_up.quota_bytes),
        ("store_set_aside_files", "Files that left the store because they were put aside", lambda: kept_up.files_set_aside),
        (
            "store_unlisted_files",
            "Files that this start found, no line of the manifest named, and it set aside",
            lambda: kept_up.files_unlisted,
        ),
        ("store_removed_files", "Files removed from disk after their grace time", lambda: kept_up.files_removed),
        ("link_looks", "Looks at which links are slow", lambda: links.looks),
        ("link_look_failures", "Looks that failed: which links are slow was not known for a minute", lambda: links.failures),
        ("link_look_seconds", "Time spent on them, in a thread of its own", lambda: links.spent_ns / 1e9),
        ("cpu_seconds", "Processor time of this process", time.process_time),
    )
    rows = [Row(f"{prefix}_info", "gauge", "1, with the version that runs", lambda: {(__version__,): 1.0}, ("version",))]
    rows += [Row(f"{prefix}_{name}", "counter", text, read) for name, text, read in counters]
    rows += [
        Row(
            f"{prefix}_displaced_records",
            "counter",
            "Records of a time over a day after their arrival (future) or 30 days before it (old): decided by their arrival",
            lambda: by_label(pipe.displaced),
            ("reason",),
        ),
        Row(f"{prefix}_items", "counter", "Items acknowledged", lambda: by_label(taken.items), ("signal",)),
        Row(
            f"{prefix}_joins",
            "counter",
            f"Evidence joined to a request, by how; {KEPT}",
            lambda: by_label(
                dict.fromkeys((k.value for k in JoinKind if k is not JoinKind.OPENED), 0) | seen.by_word(Seen.JOINS)
            ),
            ("how",),
        ),
        Row(
            f"{prefix}_decisions",
            "counter",
            f"Rows published, by why they were decided then; {KEPT}",
            lambda: by_label(dict.fromkeys((closing.value for closing in Closing), 0) | seen.by_word(Seen.DECISIONS)),
            ("closing",),
        ),
        Row(
            f"{prefix}_samples",
            "counter",
            f"Samples of GPUs, links and engines taken; {KEPT}",
            lambda: _numbers(dict.fromkeys(KINDS, 0) | seen.by_words(Seen.SAMPLES, 2)),
            ("kind", "source"),
        ),
        Row(
            f"{prefix}_source_silent_seconds",
            "gauge",
            "Since a source of this role last told of requests or sent samples; what was never heard is not here",
            lambda: _silent(pipeline, now_unix_ns()),
            ("role", "source"),
        ),
        Row(
            f"{prefix}_oldest_open_request_seconds",
            "gauge",
            "Age of the evidence that waits longest to be decided; a prefill alone may wait an hour for its decode",
            lambda: _age(stitcher.oldest_open_unix_ns(), now_unix_ns()),
        ),
        Row(
            f"{prefix}_unpublished_items",
            "gauge",
            "Rows, spans and samples that wait in memory for the next publish",
            lambda: _numbers(pipeline.unpublished()),
            ("kind",),
        ),
        Row(f"{prefix}_held_requests", "gauge", "Requests held in memory, decided ones included", lambda: len(stitcher)),
        Row(f"{prefix}_journal_lag_bytes", "gauge", "Journalled and not taken yet", lambda: running.journal.lag_bytes),
        Row(
            f"{prefix}_journal_lag_seconds",
            "gauge",
            "Age of the oldest entry that is journalled and not taken yet",
            lambda: _age(running.journal.untaken_unix_ns, now_unix_ns()),
        ),
        Row(f"{prefix}_store_bytes", "gauge", "Files of the store, as of the last upkeep pass", lambda: kept_up.bytes),
        Row(f"{prefix}_store_files", "gauge", "Number of these files", lambda: kept_up.files),
        Row(f"{prefix}_store_damaged_files", "gauge", "Listed files that cannot be read", lambda: kept_up.files_damaged),
        Row(f"{prefix}_journal_size_bytes", "gauge", "The journal on disk", lambda: running.journal.size_bytes),
        Row(
            f"{prefix}_edge_requests",
            "gauge",  # what is joined late moves from one to the other
            f"Requests of an edge, by whether every process on their path was heard; {KEPT}",
            lambda: {
                ("true",): float(seen[Seen.EDGE_JOINED]),
                ("false",): float(seen[Seen.EDGE_REQUESTS] - seen[Seen.EDGE_JOINED]),
            },
            ("joined",),
        ),
    ]
    if forwards:
        rows += [
            Row(
                f"{prefix}_forward_queue_bytes", "gauge", "Waiting to be forwarded", lambda: sum(f.queue_bytes for f in forwards)
            ),
            Row(
                f"{prefix}_forwarded_items",
                "counter",
                "Items delivered to forward endpoints",
                lambda: sum(f.stats.delivery.items_sent for f in forwards),
            ),
            Row(
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
    """Seconds; 0 where there is nothing that waits."""
    return max(0, now_unix_ns - since_unix_ns) / 1e9 if since_unix_ns is not None else 0.0


def _silent(pipeline: Pipeline, now_unix_ns: int) -> dict[tuple[str, ...], float]:
    last = pipeline.stitcher.last_told()
    for who, at in pipeline.heard.last_unix_ns.items():
        last[who] = max(at, last.get(who, 0))
    return {(role.value, source): _age(at, now_unix_ns) for (role, source), at in sorted(last.items())}
