"""Count decided requests: each once, whatever its row versions and replays.

A request counts when its row is decided for the first time; a restart finds in the store what was counted before.
Its outcome, its phases and the causes of its stalls count as they were known then.
A later version counts findings that were not seen before.
It also counts the request as joined when evidence from every process on its path has come by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from handrail.identity import JoinKind
from handrail.metrics.model_labels import OTHER, UNKNOWN, ModelLabels
from handrail.records import EngineSample, Outcome, RequestCounts, Role
from handrail_collector.counters import CounterKey, DurableCounters, Timed
from handrail_collector.metrics.coverage import By, Coverage
from handrail_collector.metrics.slow_requests import SlowRequests
from handrail_collector.rows import RequestRow, StallRow
from handrail_collector.stitch.arrival import bounded
from handrail_collector.stitch.group import AMBIGUOUS, Closing, GroupCounts, RequestGroup
from handrail_collector.store.recovery import PublishedRow, Recovered

UNANSWERED: Final = frozenset({Outcome.HTTP_ERROR.value, Outcome.UPSTREAM_UNREACHABLE.value})
"""Outcomes without an answer from a model.

The model's name is then only what the client sent, and whether the request passed the router is not known.
"""

_DECODES: Final = (Role.DECODE, Role.COLLOCATED)
_FINISHED: Final = "requests_finished"

_MOST_COUNTED: Final = 1 << 53
"""Bound of plausible counter values; a counter at or above it is ignored."""


class Counting:
    """Counts of one shard. The pipeline's loop owns it; times are passed in."""

    def __init__(self, recovered: Recovered, settle_ns: int) -> None:
        self.observed = DurableCounters(recovered.observed, recovered.added)
        by_model = (*self.observed.by_words(CounterKey.JOINED, 2), *self.observed.by_words(CounterKey.STALLS, 2))
        lines = (model for _, model in (*by_model, *self.observed.durations(Timed.PHASES, 2)))
        self.models = ModelLabels()
        self.models.names = dict.fromkeys(model for model in lines if model not in ("", UNKNOWN, OTHER))
        self._slow = SlowRequests()
        self.coverage = Coverage(settle_ns)
        self._published = recovered.rows

    # --- requests --------------------------------------------------------------------------------------------------------

    def published_before(self, group: RequestGroup, rows: Iterable[tuple[str, str]]) -> None:
        """Mark ``group`` as counted by rows (trace id, request id) in the store.

        This process or an earlier one published the rows.
        """
        for key in rows:
            published_row = self._published.get(key)
            if published_row is not None:
                group.counted.merge(_counted(published_row))

    def forget_published(self) -> None:
        """Forget the recovered rows, because no replay can make them again."""
        self._published = {}

    def row(self, group: RequestGroup, row: RequestRow, closing: Closing, now_unix_ns: int) -> None:
        """Count a row that goes into the next publish."""
        observed, counted = self.observed, group.counted
        observed.add(CounterKey.ROWS)
        observed.add(CounterKey.DECISIONS, word=closing.value)
        for join in row.joins:
            if join.how != JoinKind.OPENED.value and join.span_id not in counted.joins:
                observed.add(CounterKey.JOINS, word=join.how)
                observed.add(CounterKey.CLOCK_CONTRADICTIONS, int(join.span_id in group.contradicting))
        counted.joins |= {join.span_id for join in row.joins}
        if row.scope == "edge":
            observed.add(CounterKey.EDGE_REQUESTS, int(counted.edge is None))
            observed.add(CounterKey.EDGE_JOINED, row.complete - bool(counted.edge))
            counted.edge = row.complete
        self._findings(group, row)
        self._joined(group, row, now_unix_ns)
        if row.phase_of == "ttft" and not counted.phases:
            counted.phases = True
            self._phases(row, now_unix_ns)

    def _findings(self, group: RequestGroup, row: RequestRow) -> None:
        if not row.findings:
            return
        counted = group.counted
        kinds = PublishedRow.of(row).findings
        self.observed.add(CounterKey.AMBIGUOUS_JOINS, max(0, kinds.count(AMBIGUOUS) - counted.ambiguous))
        counted.ambiguous = max(kinds.count(AMBIGUOUS), counted.ambiguous)
        for kind in dict.fromkeys(kinds):
            if kind not in counted.findings:
                self.observed.add(CounterKey.FINDINGS, word=kind)
        counted.findings |= frozenset(kinds)

    def _joined(self, group: RequestGroup, row: RequestRow, now_unix_ns: int) -> None:
        """Count a request as joined once it is complete.

        When edges count, a request without an edge is not counted: its path lacks the edge.
        """
        by = self.coverage.by(now_unix_ns)
        instance = row.edge_instance if by is By.EDGE else row.decode_instance
        if group.counted.joined or not row.complete or instance is None or row.outcome in UNANSWERED:
            return
        group.counted.joined = True
        self.observed.add(CounterKey.JOINED, word=f"{row.outcome}.{self._model(row)}")
        self.coverage.joined(by, instance, row.started_unix_ns + row.duration_ns)

    def _phases(self, row: RequestRow, now_unix_ns: int) -> None:
        """Add the phases of a time to first token.

        The total time of a response without streaming includes all of its decoding, so it is not used.
        """
        model = self._model(row)
        spent: dict[str, int] = {}
        for phase in row.phases:  # a phase may have several parts: by process, and the preempted time apart
            spent[phase.phase] = spent.get(phase.phase, 0) + phase.duration_ns
        for name, duration_ns in spent.items():
            self.observed.time(Timed.PHASES, (name, model), duration_ns, row.trace_id, now_unix_ns)
        if self._slow.slow(model, row.scope, sum(spent.values())):
            self.observed.add(CounterKey.SLOW_REQUESTS, word=model)
            for name, duration_ns in spent.items():
                self.observed.add(CounterKey.SLOW_NS, duration_ns, f"{name}.{model}")

    def stalls(self, group: RequestGroup, row: RequestRow, stalls: Sequence[StallRow]) -> None:
        """Count the stalls of a row that goes into the next publish.

        Each counts once, by the cause of its first version.
        """
        causes = [stall.cause for stall in stalls if stall.number >= 0]
        if not causes or group.counted.stalls:
            return
        group.counted.stalls = True
        model = self._model(row)
        for cause in causes:
            self.observed.add(CounterKey.STALLS, word=f"{cause}.{model}")

    def _model(self, row: RequestRow) -> str:
        """Return the model label. A name that only a client sent gets no label of its own."""
        return self.models.ask(row.model) if row.outcome in UNANSWERED else self.models.serve(row.model)

    # --- what others count -----------------------------------------------------------------------------------------------

    def requests(self, counts: RequestCounts, received_unix_ns: int, *, again: bool) -> None:
        """Take the request counts of an edge's proxy.

        ``again``: an earlier process took the same report.
        """
        if counts.process.role is Role.EDGE:
            answered = sum(count for outcome, count in counts.finished.items() if outcome not in UNANSWERED)
            self._read(By.EDGE, counts, answered, counts.start_unix_ns, received_unix_ns, again=again)

    def sample(self, sample: EngineSample, received_unix_ns: int, *, again: bool) -> None:
        """Take the request count of an engine that decodes, if its metrics have one."""
        if sample.process.role not in _DECODES:
            return
        finished = [value for value in sample.values if value.name == _FINISHED]
        if finished:
            start = min(value.start_unix_ns for value in finished)
            self._read(By.ENGINE, sample, sum(value.value for value in finished), start, received_unix_ns, again=again)

    def _read(
        self,
        by: By,
        report: RequestCounts | EngineSample,
        value: float,
        start_unix_ns: int,
        received_unix_ns: int,
        *,
        again: bool,
    ) -> None:
        if not 0 <= value < _MOST_COUNTED:  # also excludes NaN
            return
        instance = report.process.instance
        at = bounded(report.at_unix_ns, received_unix_ns)
        counted = self.coverage.read(by, instance, start_unix_ns, value, at, received_unix_ns, again=again)
        if by is self.coverage.by(received_unix_ns):
            self.observed.add(CounterKey.COUNTED, counted, by.value)


def _counted(published_row: PublishedRow) -> GroupCounts:
    """Return what was counted when such a row was decided, at most.

    What is not sure is not counted again.
    """
    return GroupCounts(
        phases=published_row.first_token,
        joined=published_row.complete,
        stalls=True,
        edge=published_row.complete if published_row.edge else None,
        findings=frozenset(published_row.findings),
        ambiguous=published_row.findings.count(AMBIGUOUS),
    )
