"""Count requests as they happen: first tokens, gaps between chunks, ends.

The event loop that forwards the bytes is the only owner of this state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from handrail.metrics.exponential_histogram import GapSketch, bucket_middle_ns
from handrail.metrics.histogram import LATENCY, Exemplar, Histogram
from handrail.metrics.model_labels import UNKNOWN, ModelLabels
from handrail.records import ENGINE_GONE, EngineTimes, Exchange, Gaps, Outcome, Role
from handrail_sidecar.live_metrics.slo import ANSWERED, FAILURES, OBJECTIVES, TTFT, RequestObjectives, judge
from handrail_sidecar.proxy.response_reader import ResponseReader

SCOPES: Final = {Role.EDGE: "edge", Role.ROUTER: "router", Role.DECODE: "decode", Role.COLLOCATED: "decode"}
"""Scope of an exchange's TTFT, by the role of the observing process.

P's own answer has no first token that a client waits for.
An edge and a router that see the same request must not be added up, so each has its own scope.
"""

ENGINE_SCOPE: Final = "engine"
OUTCOMES: Final = tuple(outcome for outcome in Outcome if outcome is not Outcome.TAINTED)
"""Outcomes that are counted; ``tainted`` is known only for joined requests."""

EXEMPLAR_EVERY_NS: Final = 10**9
"""At most one new exemplar per second and process."""

EXEMPLAR_FRESH_NS: Final = 60 * 10**9
"""Time for which a bucket keeps its exemplar.

A slow request usually falls into a bucket of its own, so it is rarely refused.
"""

Labels = tuple[str, ...]

_ENGINE_OUTCOMES: Final = {
    "stopped": Outcome.OK,
    "length_capped": Outcome.OK,
    "repetition": Outcome.OK,
    "ignored": Outcome.ABORTED,
    "aborted": Outcome.ABORTED,
    "error": Outcome.STREAM_ERROR,
    **dict.fromkeys(ENGINE_GONE, Outcome.UPSTREAM_DISCONNECT),
}


class Exemplars:
    """Chooses the requests that become exemplars of buckets, at a bounded rate.

    An exemplar whose trace was sampled away is a dead link.
    So a request that becomes one has ``handrail.exemplar`` on its span and is kept.
    The rate is capped since each forced trace is stored.
    ``wall`` is the wall clock that paces them and that the page shows.
    """

    def __init__(self, wall: Callable[[], int]) -> None:
        self._wall = wall
        self._last_ns = 0

    def offer(self, histogram: Histogram, at: int, trace_id: str, value: int) -> bool:
        """Offer a request; return True when it became the exemplar of bucket ``at``."""
        if not trace_id:
            return False
        now = self._wall()
        held = histogram.exemplars.get(at)
        if (held is not None and 0 <= now - held.unix_ns < EXEMPLAR_FRESH_NS) or 0 <= now - self._last_ns < EXEMPLAR_EVERY_NS:
            return False
        self._last_ns = now
        histogram.exemplars[at] = Exemplar(trace_id, value, now)
        return True


class LiveRequest:
    """One exchange in progress, driven by its ``ExchangeObserver``."""

    __slots__ = ("_all", "_gaps", "_itl", "_model", "_requested_model", "_served", "_trace_id", "_ttft", "exemplar")

    def __init__(self, requests: LiveRequests, trace_id: str) -> None:
        self.exemplar = False
        self._all = requests
        self._trace_id = trace_id
        self._model: str | None = None  # the model's label, once it is known
        self._requested_model: str | None = None
        self._served = False
        self._ttft = False
        self._gaps: Histogram | None = None
        self._itl: Histogram | None = None

    def answered(self, reader: ResponseReader, status: int, requested_model: str | None) -> None:
        """Note that the response has begun.

        From here on, gaps are reported when it is known which chunks belong to one choice.
        """
        self._requested_model, self._served = requested_model, status < 400
        reader.follow(self._take_gaps, self._take_itl)

    def look(self, reader: ResponseReader) -> None:
        """Note that a part of the response has been read."""
        if self._model is None and (model := reader.model):
            self._label(model)
        if not self._ttft and (ttft_ns := reader.first_token_ns) is not None:
            self._ttft = True
            self.exemplar = self._all.first_token(self._label(None), ttft_ns, self._trace_id)
        reader.tell()

    def ended(self, record: Exchange) -> None:
        """Count an exchange that has ended, by its record.

        What could not be reported before is counted now.
        """
        label = self._label(record.model)
        if record.ttft_token_ns is not None and not self._ttft:
            self._ttft = True
            self._all.first_token(label, record.ttft_token_ns, "")
        if self._gaps is None and record.gaps is not None:
            _add(self._all.gaps_of(label), record.gaps)
        if self._itl is None and record.itl is not None:
            _add(self._all.itl_of(label), record.itl)
        self._all.ended(label, record, ttft_judged=self._ttft)

    def _label(self, model: str | None) -> str:
        if self._model is None:
            models = self._all.models
            self._model = (
                models.serve(model or self._requested_model) if self._served else models.ask(model or self._requested_model)
            )
        return self._model

    def _take_gaps(self, gaps_ns: list[int]) -> None:
        if self._gaps is None:
            self._gaps = self._all.gaps_of(self._label(None))
        self._gaps.extend(gaps_ns)

    def _take_itl(self, shares: list[tuple[int, int]]) -> None:
        if self._itl is None:
            self._itl = self._all.itl_of(self._label(None))
        for each_ns, tokens in shares:
            self._itl.observe(each_ns, tokens)


class LiveRequests:
    """All requests that one process observes.

    ``wall``: wall clock in ns, for exemplars. ``make``: class of the histograms.
    """

    def __init__(
        self, role: Role, objectives: RequestObjectives, *, wall: Callable[[], int], make: type[Histogram] = Histogram
    ) -> None:
        self.models = ModelLabels()
        self.ttft: dict[Labels, Histogram] = {}  # model_name, role, scope
        self.gaps: dict[Labels, Histogram] = {}  # model_name, role
        self.itl: dict[Labels, Histogram] = {}
        self.tpot: dict[Labels, Histogram] = {}
        self.e2e: dict[Labels, Histogram] = {}
        self.outcomes: dict[tuple[str, Outcome], int] = {}
        self.judged: dict[tuple[str, str, bool], int] = {}
        self.failed: dict[tuple[str, Outcome], Exemplar] = {}  # the last of each
        self.exemplars = Exemplars(wall)
        self._make = make
        self._role = role
        self.objectives = objectives
        self._exchanges = False  # a process in front of the engine counts requests; the engine's own count would double them
        self.know(())

    def begin(self, trace_id: str) -> LiveRequest:
        """Begin an exchange."""
        self._exchanges = True
        return LiveRequest(self, trace_id)

    def know(self, models: Iterable[str]) -> None:
        """Register the models that are served here.

        Their failures are counted from 0 on, so that the first one is an increase (case H01).
        """
        for name in models:
            self.models.serve(name)
        for label in (UNKNOWN, *self.models.names):
            self._born(label)

    def gaps_of(self, model: str) -> Histogram:
        return self._of(self.gaps, (model, self._role.value))

    def itl_of(self, model: str) -> Histogram:
        return self._of(self.itl, (model, self._role.value))

    def first_token(self, model: str, ttft_ns: int, trace_id: str) -> bool:
        """Count the first token of an exchange; return whether it became an exemplar.

        An exchange without ``trace_id`` never becomes one.
        """
        scope = SCOPES.get(self._role)
        if scope is None:
            return False
        self._judged(model, TTFT, ttft_ns <= self.objectives.ttft_ns)
        return self._timed(model, scope, ttft_ns, trace_id)

    def engine_first_token(self, model: str | None, ttft_ns: int, trace_id: str) -> None:
        """Count a first token by the engine's scheduler: from queued to first token."""
        self._timed(self._engine_label(model), ENGINE_SCOPE, ttft_ns, trace_id)

    def ended(self, model: str, record: Exchange, *, ttft_judged: bool) -> None:
        self._count(model, record.outcome)
        if record.outcome in FAILURES:
            ended_unix_ns = record.arrival_unix_ns + record.duration_ns
            self.failed[model, record.outcome] = Exemplar(record.ids.trace_id, 1, ended_unix_ns)
        if record.outcome in ANSWERED:
            self._of(self.e2e, (model, self._role.value)).observe(record.duration_ns)
            if record.tpot_mean_ns is not None:
                self._of(self.tpot, (model, self._role.value)).observe(record.tpot_mean_ns)
        if self._role in SCOPES:
            for objective, met in judge(record, self.objectives, ttft_judged=ttft_judged):
                self._judged(model, objective, met)

    def engine_ended(self, model: str | None, times: EngineTimes) -> None:
        """Count an ended request by the engine's scheduler, unless exchanges are counted."""
        if not self._exchanges:
            self._count(self._engine_label(model), _ENGINE_OUTCOMES.get(times.status or "", Outcome.UNKNOWN))

    def _engine_label(self, model: str | None) -> str:
        """Return the label of the engine's model.

        An engine names its model by the path that it loaded; clients know it by the name that it is served under.
        """
        return self.models.only() or self.models.serve(model)

    def _of(self, histograms: dict[Labels, Histogram], labels: Labels) -> Histogram:
        found = histograms.get(labels)
        if found is None:
            found = histograms[labels] = self._make(LATENCY)
        return found

    def _timed(self, model: str, scope: str, ttft_ns: int, trace_id: str) -> bool:
        histogram = self._of(self.ttft, (model, self._role.value, scope))
        return self.exemplars.offer(histogram, histogram.observe(ttft_ns), trace_id, ttft_ns)

    def _count(self, model: str, outcome: Outcome) -> None:
        self._born(model)
        self.outcomes[model, outcome] += 1

    def _judged(self, model: str, objective: str, met: bool) -> None:
        self._born(model)
        self.judged[model, objective, met] += 1

    def _born(self, model: str) -> None:
        if (model, Outcome.OK) not in self.outcomes:
            self.outcomes |= {(model, outcome): 0 for outcome in OUTCOMES}
            if self._role in SCOPES:
                self.judged |= {(model, objective, met): 0 for objective in OBJECTIVES for met in (True, False)}


def _add(histogram: Histogram, gaps: Gaps) -> None:
    """Add the gaps of a sketch, each by the middle of its bucket: within 1 %."""
    for index, weight in GapSketch.decode(gaps.sketch).buckets().items():
        histogram.observe(bucket_middle_ns(index), weight)
