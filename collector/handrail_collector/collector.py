"""The collector's process: receivers, journal, pipeline, store, forward sinks and the API, in that order of the data's way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from handrail import conventions as names
from handrail.config import plain
from handrail.identity import JoinKind
from handrail.listeners import Protection
from handrail.otlp.contract import Signal
from handrail.otlp.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.process import Parts, Stop, spare_the_heap
from handrail.process import run as run_process
from handrail.securitymetrics import security_rows
from handrail.selfmetrics import Row, SelfMetrics, by_label
from handrail.settings import bound, write_ready
from handrail.watched import Watcher
from handrail_collector.api.server import ApiServer
from handrail_collector.config import CollectorConfig
from handrail_collector.explain.stall_evidence import Cause
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.observed import Seen
from handrail_collector.pipeline import Pipeline, PipelineSettings
from handrail_collector.sinks.otlp import ForwardSettings, OtlpForward
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.group import Closing
from handrail_collector.stitch.stitcher import StitchSettings
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.publish import Publisher, StoreLockedError
from handrail_collector.store.read import StoreReader
from handrail_collector.store.upkeep import Upkeep, UpkeepSettings

log = logging.getLogger(__name__)

KEPT = "as of the last publish, over restarts"
"""Help of what is counted in the store itself: a replay counts nothing of it again."""

HOWS = tuple(kind.value for kind in JoinKind if kind is not JoinKind.OPENED)

JOURNAL_FULL_S = 15.0
"""How long after a refusal the collector counts as full."""


def run(config: CollectorConfig) -> int:
    """Run until SIGTERM or Ctrl-C; the exit code."""
    return run_process(_main(config))


@dataclass(slots=True)
class Running:
    """The parts of a collector that others look at."""

    journal: Journal
    pipeline: Pipeline
    receiver: OtlpServer
    forwards: tuple[OtlpForward, ...]
    upkeep: Upkeep
    started_unix_ns: int
    _refused: int = 0
    _refused_at: float = 0.0

    def not_ready(self) -> str:
        """Why nothing can be accepted, or ''."""
        if not self.journal.healthy:
            return "the journal's disk failed; restart once it is mended"
        refused = self.journal.stats.refused_full
        if refused != self._refused:
            self._refused, self._refused_at = refused, time.monotonic()
        if self._refused and time.monotonic() - self._refused_at < JOURNAL_FULL_S:
            return "the journal is full: senders are told to retry; raise journal_max_bytes or see why the pipeline lags"
        if self.pipeline.stats.failing >= 3:
            return "publishing to the store fails again and again; see the log"
        return ""

    def status(self) -> dict[str, Any]:
        """For ``GET /api/v1/status``: how far everything is, and how much of the traffic is covered."""
        pipeline, journal = self.pipeline.stats, self.journal
        seen = pipeline.edge_rows
        return {
            "started_unix_ns": self.started_unix_ns,
            "requests": {
                "rows": pipeline.rows,
                "edge": seen,
                "joined": pipeline.edge_complete,
                "coverage": pipeline.edge_complete / seen if seen else None,
                "open": len(self.pipeline.stitcher.open_groups()),
            },
            "spans": {"received": pipeline.spans, "stored": pipeline.spans_stored, "duplicates": self.pipeline.duplicates.spans},
            "journal": {
                "end_offset": journal.end,
                "published_offset": pipeline.published_offset,
                "lag_bytes": journal.lag_bytes,
                "size_bytes": journal.size_bytes,
                "damaged_bytes": journal.damaged_bytes,
            },
            "reporting": sorted(f"{role.value}:{source}" for role, source in self.pipeline.fleet().reporting),
            "pinned": [
                {"instance": instance, "bytes": size, "oldest_ns": oldest}
                for instance, (size, oldest) in sorted(self.pipeline.pinned().items())
            ],
            "clocks": [
                {"from": a, "to": b, "low_ns": i.low_ns, "high_ns": i.high_ns}
                for (a, b), i in sorted(self.pipeline.stitcher.clocks.intervals().items())
            ],
            "forward": [
                {"up": f.stats.delivery.up, "sent": f.stats.delivery.items_sent, "queue_bytes": f.queue_bytes}
                for f in self.forwards
            ],
        }


async def _main(config: CollectorConfig) -> int:
    stop = Stop()
    protection = Protection(config.tls, config.auth, [each.value for each in config.plaintext])
    protection.warn_of_open(config.listeners)
    publisher = Publisher(config.data / "store")
    try:
        recovered = await asyncio.to_thread(publisher.open)
    except (StoreLockedError, StoreDamagedError) as error:
        raise OSError(str(error)) from error
    settings = JournalSettings(folder=config.data / "journal", max_bytes=config.journal_max_bytes)
    log_file = await asyncio.to_thread(lambda: settings.open_log(floor=recovered.end_offset))
    journal = Journal(log_file, max_pending_bytes=settings.max_pending_bytes, retry_delay_s=settings.retry_delay_s)
    forwards = tuple(OtlpForward(ForwardSettings(client=ClientSettings(endpoint=url))) for url in config.forward)

    def forward(signal: Signal, payload: bytes) -> None:
        for each in forwards:
            each.offer(signal, payload)

    pipeline = Pipeline(
        journal,
        publisher,
        recovered,
        _pipeline_settings(config),
        journal_max_bytes=config.journal_max_bytes,
        forward=forward if forwards else None,
    )
    grpc, http = config.otlp_grpc, config.otlp_http
    receiver = OtlpServer(
        journal,
        grpc=(grpc.host, grpc.port) if grpc else None,
        http=(http.host, http.port) if http else None,
        loopback_only=False,  # the configuration's check has seen to it
        grpc_tls=protection.tls("otlp_grpc"),
        http_tls=protection.tls("otlp_http"),
        grpc_guard=protection.guard("otlp_grpc"),
        http_guard=protection.guard("otlp_http"),
    )
    api_guard = protection.guard("api", certificates=True)
    upkeep = Upkeep(publisher, _upkeep_settings(config))
    running = Running(journal, pipeline, receiver, forwards, upkeep, time.time_ns())
    parts = Parts()
    addresses: dict[str, str] = {}
    for each in forwards:
        await parts.start("forward", each.start(), each.shutdown)
    await parts.start("journal", journal.start(), _nothing)
    working = asyncio.create_task(pipeline.run())

    async def drain() -> None:
        # the journal's end lets the pipeline read to its end and publish; only then may the store be let go
        await journal.shutdown()
        await working
        publisher.close()

    await parts.start("pipeline", _nothing(), drain)
    ending = asyncio.Event()
    in_order = asyncio.create_task(_keep_in_order(upkeep, config.store.upkeep_interval.seconds, ending))

    async def end_upkeep() -> None:
        ending.set()
        upkeep.stop()
        await in_order

    await parts.start("upkeep", _nothing(), end_upkeep)
    watcher = Watcher(protection.watched)
    await parts.start("certificates", watcher.start(), watcher.shutdown)
    await parts.start("receivers", receiver.start(), receiver.shutdown)
    addresses.update(bound(otlp_grpc=receiver.grpc_address, otlp_http=receiver.http_address))
    if config.api is not None:
        reader = StoreReader(config.data / "store")
        api = ApiServer(
            reader,
            pipeline,
            running.status,
            config.api.host,
            config.api.port,
            metrics=SelfMetrics([*_rows(running), *security_rows(protection.watched, protection.guards)]),
            not_ready=running.not_ready,
            tls=protection.context("api", ask_only=True),
            guard=api_guard,
        )
        await parts.start("api", api.start(), api.shutdown)
        addresses.update(bound(api=api.address))
    log.info("collecting into %s: %s", config.data, ", ".join(f"{name} {at}" for name, at in addresses.items()))
    log.debug("configuration: %s", plain(config))
    # Thousands of requests are held at any moment and none of them is a cycle: the default thresholds cost 15 % of the pipeline
    # (tests/bench/bench_pipeline.py: 6.9k spans/s, 7.5k with these, 8.1k without a collector at all).
    spare_the_heap(young=50_000)
    if config.ready_file is not None:
        write_ready(config.ready_file, addresses)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
    failed = working.done() and not stopped.done()
    if failed:
        log.error("the pipeline ended by itself", exc_info=working.exception())
    stopped.cancel()
    await parts.end()
    return 1 if failed else 0


async def _nothing() -> None:
    return None


async def _keep_in_order(upkeep: Upkeep, interval_s: float, ending: asyncio.Event) -> None:
    """A pass now and after every interval, in a thread, until ``ending``."""
    while not ending.is_set():
        await asyncio.to_thread(upkeep.run_pass)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending.wait(), interval_s)


def _upkeep_settings(config: CollectorConfig) -> UpkeepSettings:
    store = config.store
    return UpkeepSettings(
        closed_after_ns=store.compact_after,
        grace_ns=store.grace,
        retention_ns=store.retention,
        samples_retention_ns=store.samples_retention,
        max_bytes=store.max_bytes,
        rollups=True,
    )


def _pipeline_settings(config: CollectorConfig) -> PipelineSettings:
    decision = config.decision
    return PipelineSettings(
        flush_interval_ns=config.flush_interval,
        hung_ns=decision.hung_after,
        stitch=StitchSettings(
            settle_ns=decision.settle,
            engine_wait_ns=decision.engine_wait,
            max_open_ns=decision.max_open,
            max_groups=decision.max_open_requests,
        ),
    )


CLOCK_PAIRS = 50


def clock_bounds(clocks: HostClocks) -> dict[tuple[str, ...], float]:
    """Seconds by (host, peer host)."""
    widths = {pair: interval.width_ns / 1e9 for pair, interval in clocks.intervals().items() if interval.width_ns is not None}
    return dict(sorted(widths.items(), key=lambda each: -each[1])[:CLOCK_PAIRS])


def _rows(running: Running) -> list[Row]:
    """What the collector says of its own work."""
    prefix = names.METRIC_COLLECTOR
    taken, kept, pipe = running.receiver.stats, running.journal.stats, running.pipeline.stats
    stitcher, seen = running.pipeline.stitcher, running.pipeline.observed
    forwards, kept_up = running.forwards, running.upkeep.stats
    counters: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("refused_requests", "Export requests told to retry", lambda: taken.requests_refused),
        ("rejected_requests", "Export requests refused for good", lambda: taken.requests_rejected),
        ("rejected_items", "Items refused one by one (bad ids)", lambda: taken.items_rejected),
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
        ("store_quota_days", "Days that left the store early because it was over its bound", lambda: kept_up.quota_days),
        ("store_quota_bytes", "Bytes of these days", lambda: kept_up.quota_bytes),
        ("store_set_aside_files", "Files that left the store because they were put aside", lambda: kept_up.files_set_aside),
        (
            "store_unlisted_files",
            "Files that this start found, no line of the manifest named, and it set aside",
            lambda: kept_up.files_unlisted,
        ),
        ("store_removed_files", "Files removed from disk after their grace time", lambda: kept_up.files_removed),
        ("cpu_seconds", "Processor time of this process", time.process_time),
    )
    rows = [Row(f"{prefix}_{name}", "counter", text, read) for name, text, read in counters]
    rows += [
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
            names.METRIC_STALLS,
            "counter",
            f"Stalls of streams (the longest of each), by what made them; {KEPT}",
            lambda: by_label(dict.fromkeys((cause.value for cause in Cause), 0) | seen.by_word(Seen.STALLS)),
            ("cause",),
        ),
        Row(f"{prefix}_held_requests", "gauge", "Requests held in memory, decided ones included", lambda: len(stitcher)),
        Row(
            names.METRIC_CLOCK_BOUND,
            "gauge",
            f"How far apart the bounds of two hosts' clock offset lie; the {CLOCK_PAIRS} widest pairs that are bounded at all",
            lambda: clock_bounds(stitcher.clocks),
            ("host", "peer_host"),
        ),
        Row(f"{prefix}_journal_lag_bytes", "gauge", "Journalled and not taken yet", lambda: running.journal.lag_bytes),
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
