"""Count hand-offs as they end, for the sidecar's own /metrics.

Alerts use these counts while the collector still stitches.
The outcomes are those of ``kv_outcomes.py``, as far as one engine can determine them. The collector sees both ends and may know
better (a read of expired blocks is ``ok`` to D and ``stale_read`` to P).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from handrail.kv_outcomes import FetchOutcome
from handrail.metrics.histogram import LATENCY, SIZE, Exemplar, Histogram
from handrail.records import ENGINE_GONE, FetchEffect, KvFetch, KvPublish, Observation

OUTCOMES: Final = (
    FetchOutcome.OK,
    FetchOutcome.FAILED,
    FetchOutcome.RECOMPUTED,
    FetchOutcome.ABORTED,
    FetchOutcome.UNKNOWN,
)
"""Outcomes that one engine can determine by itself."""

_FAILED: Final = (FetchOutcome.FAILED, FetchOutcome.RECOMPUTED)

ENDS: Final = ("read", FetchOutcome.EXPIRED.value, FetchOutcome.STALE_READ.value, "lost", FetchOutcome.UNKNOWN.value)
REASONS: Final = (
    "transfer_setup_failed",
    "transfer_failed",
    "transfer_exception",
    "handshake_setup_failed",
    "handshake_failed",
    "push_handshake_failed",
    "push_reg_handshake_failed",
    "push_reg_notif_failed",
    "load_failed",
)
"""Reasons why a load was lost; counted from 0 on.

They are failure types of vLLM 0.32 (``nixl/worker.py``, ``push_worker.py``), and Handrail's own for a load that just failed.
Counting starts at 0, so that the first failure of a type is an increase (case H01).
"""

MAX_REASONS: Final = 32
OTHER: Final = "other"


class HandOffTally:
    """Counts since start.

    ``fetches``: by outcome and reason; the reasons are bounded. ``publishes``: by how they ended.
    ``seconds``: from the transfer's post until it was done, by outcome; ``waits``: from when the load was known until its post
    (for blocks, for a slot, for the first contact); ``sizes``: bytes moved. ``last``: the last fetch that did
    not go well. ``make``: which kind of histogram.
    """

    def __init__(self, make: type[Histogram] = Histogram) -> None:
        self.fetches: Counter[tuple[str, str]] = Counter({(outcome.value, ""): 0 for outcome in OUTCOMES})
        self.fetches.update({(outcome.value, reason): 0 for outcome in _FAILED for reason in REASONS})
        self.last: dict[tuple[str, ...], Exemplar] = {}  # that did not go well, by outcome and reason
        self.publishes: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.bytes_fetched = 0
        self.seconds: dict[tuple[str, ...], Histogram] = {(FetchOutcome.OK.value,): make(LATENCY)}
        self.waits = make(LATENCY)
        self.sizes = make(SIZE)
        self._make = make
        self._reasons: set[str] = {"", *REASONS}

    def take(self, record: Observation) -> None:
        if isinstance(record, KvFetch) and not record.provisional:
            outcome = outcome_of(record).value
            counted = (outcome, self._reason(record.failure or ""))
            self.fetches[counted] += 1
            if outcome != FetchOutcome.OK.value:
                self.last[counted] = Exemplar(record.ids.trace_id, 1, record.known_unix_ns + (record.ended_ns or 0))
            self.bytes_fetched += record.bytes_moved or 0
            self._time(outcome, record)
        elif isinstance(record, KvPublish) and not record.provisional:
            self.publishes[end_of(record)] += 1

    def _time(self, outcome: str, record: KvFetch) -> None:
        if record.posted_ns is not None:
            self.waits.observe(record.posted_ns)
            if record.done_ns is not None:
                if (outcome,) not in self.seconds:
                    self.seconds[outcome,] = self._make(LATENCY)
                self.seconds[outcome,].observe(record.done_ns - record.posted_ns)
        if record.bytes_moved is not None:
            self.sizes.observe(record.bytes_moved)

    def _reason(self, reason: str) -> str:
        if reason not in self._reasons:
            if len(self._reasons) >= MAX_REASONS:
                return OTHER
            self._reasons.add(reason)
        return reason


def outcome_of(fetch: KvFetch) -> FetchOutcome:
    """The outcome of a load, as far as the consumer can determine it."""
    if fetch.effect is FetchEffect.RECOMPUTED:
        return FetchOutcome.RECOMPUTED
    if fetch.effect is FetchEffect.FAILED:
        return FetchOutcome.FAILED
    if fetch.request_status == "aborted":
        return FetchOutcome.ABORTED
    if fetch.request_status is not None:
        return FetchOutcome.UNKNOWN
    return FetchOutcome.FAILED if fetch.failure is not None and fetch.ranks_done == 0 else FetchOutcome.OK


def end_of(publish: KvPublish) -> str:
    """How a publish came to its end.

    A read after expiry is reported after the expiry, so both count.
    """
    if publish.late_read_ns is not None:
        return FetchOutcome.STALE_READ.value
    if publish.failure in ENGINE_GONE:
        return "lost"
    if publish.expired_ns is not None:
        return FetchOutcome.EXPIRED.value
    return "read" if publish.read_ns is not None or publish.done_ns is not None else "unknown"
