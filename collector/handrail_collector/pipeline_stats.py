"""Count what the pipeline has done since its start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from handrail.otlp.signals import Signal
from handrail_collector.stitch.arrival import REASONS

log = logging.getLogger(__name__)

MAX_LOGGED_FAULTS = 20


@dataclass(slots=True)
class PipelineStats:
    """Counts since start."""

    entries: dict[str, int] = field(default_factory=lambda: {signal.value: 0 for signal in Signal})
    spans: int = 0
    spans_stored: int = 0
    own_spans: int = 0  # of Handrail's own work; neither joined nor stored
    log_records: int = 0
    samples: int = 0
    rows: int = 0
    rows_skipped: int = 0  # made again by a replay and already in the store
    undecodable: int = 0
    displaced: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # records with impossible times
    faults: int = 0  # exceptions over one span, request or row, which is left out
    failing: int = 0  # consecutive publishes that failed
    publishes: int = 0
    publish_failures: int = 0
    edge_rows: int = 0
    edge_complete: int = 0
    published_offset: int = 0

    def fault(self, what: str) -> None:
        """Count the exception that is being handled, and log the first ones.

        It belongs to one piece of input.
        """
        self.faults += 1
        if self.faults <= MAX_LOGGED_FAULTS:
            log.exception("%s (fault %d; the first %d are logged)", what, self.faults, MAX_LOGGED_FAULTS)
