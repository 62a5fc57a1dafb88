"""Report the state of a collector's process: readiness and progress."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from handrail.otlp.receiver import grpc_front
from handrail.otlp.receiver.server import OtlpServer
from handrail.runtime.connections import Gates
from handrail.runtime.descriptors import DescriptorBudget
from handrail.telemetry.metrics import OtlpMetricsStats
from handrail.telemetry.traces import OwnTraces
from handrail_collector.config import CollectorConfig
from handrail_collector.counters import CounterKey
from handrail_collector.journal.journal import Journal
from handrail_collector.pipeline import Pipeline
from handrail_collector.sinks.otlp import OtlpForward
from handrail_collector.store.maintenance import Upkeep

JOURNAL_FULL_S = 15.0
"""Time after a refusal during which the collector counts as full, seconds."""

RESERVED_DESCRIPTORS = 256
"""File descriptors kept for the journal, store, maintenance and forwarding.

Readers of the store use them too.
"""


def collector_gates(config: CollectorConfig) -> Gates:
    """Give each listener a third of the file descriptors that are not reserved."""
    shares = {"otlp_grpc": (1 / 3, grpc_front.DESCRIPTORS), "otlp_http": (1 / 3, 1), "api": (1 / 3, 1)}
    return Gates(config.connections, DescriptorBudget.of_process(RESERVED_DESCRIPTORS), shares)


@dataclass(slots=True)
class Running:
    """The running parts of a collector. The process's loop owns it."""

    journal: Journal
    pipeline: Pipeline
    receiver: OtlpServer
    forwards: tuple[OtlpForward, ...]
    upkeep: Upkeep
    started_unix_ns: int
    gates: Gates
    pushed: OtlpMetricsStats | None = None
    traces: OwnTraces | None = None
    _refused: int = 0
    _refused_at: float = 0.0

    def not_ready(self) -> str:
        """Return why nothing can be accepted, or ''."""
        if not self.journal.healthy:
            return "the journal's disk failed; repair it, then restart"
        refused = self.journal.stats.refused_full
        if refused != self._refused:
            self._refused, self._refused_at = refused, time.monotonic()
        if self._refused and time.monotonic() - self._refused_at < JOURNAL_FULL_S:
            return "the journal is full: senders must retry later; raise journal_max_bytes or find out why the pipeline lags"
        if self.pipeline.stats.failing >= 3:
            return "publishing to the store keeps failing; see the log"
        return self.gates.problem()

    def status(self) -> dict[str, Any]:
        """Return the progress of every part and the coverage, for ``GET /api/v1/status``."""
        pipeline, journal = self.pipeline.stats, self.journal
        seen, now = pipeline.edge_rows, time.time_ns()
        return {
            "started_unix_ns": self.started_unix_ns,
            "requests": {
                "rows": pipeline.rows,
                "edge": seen,
                "joined": pipeline.edge_complete,
                "coverage": self.pipeline.counting.coverage.ratio(now),
                "open": len(self.pipeline.stitcher.open_groups()),
            },
            "spans": {
                "received": pipeline.spans,
                "stored": pipeline.spans_stored,
                "duplicates": self.pipeline.intake.duplicates.spans,
            },
            "journal": {
                "end_offset": journal.end,
                "published_offset": pipeline.published_offset,
                "lag_bytes": journal.lag_bytes,
                "size_bytes": journal.size_bytes,
                "damaged_bytes": journal.damaged_bytes,
            },
            "reporting": sorted(f"{role.value}:{source}" for role, source in self.pipeline.reporting(now)),
            "samples": {
                f"{kind}:{source}": n
                for (kind, source), n in sorted(self.pipeline.observed.by_words(CounterKey.SAMPLES, 2).items())
            },
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
