"""Define the metrics that need the joined request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from handrail import conventions as names
from handrail.metrics.histogram import LATENCY, LATENCY_BOUND, Histogram
from handrail.metrics.model_labels import UNKNOWN
from handrail.metrics.registry import AnyMetricDef, HistogramDef, MetricDef, by_label
from handrail.records import Outcome
from handrail_collector.counters import KEPT, CounterKey, DurableCounters, Timed
from handrail_collector.explain.request.findings import FINDINGS
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.metrics.counting import UNANSWERED, Counting
from handrail_collector.metrics.coverage import By
from handrail_collector.metrics.slow_links import LEAST_TIMED, MOST_PAIRS, SlowLinks
from handrail_collector.metrics.slow_requests import WINDOW
from handrail_collector.stitch.clocks import HostClocks

CLOCK_PAIRS: Final = 50

FRESH_NS: Final = 3600 * 10**9
"""Longest age of an exemplar in its bucket, ns."""

OUTCOMES: Final = tuple(outcome.value for outcome in Outcome if outcome.value not in UNANSWERED)
"""Outcomes of requests that a model answered."""


def joined_rows(
    counting: Counting, clocks: HostClocks, links: SlowLinks, now_unix_ns: Callable[[], int] = time.time_ns
) -> list[AnyMetricDef]:
    """List these metrics."""
    seen = counting.observed
    return [
        HistogramDef(
            names.METRIC_PHASES,
            f"Time of a phase of time to first token, of streamed requests at their first decision. {LATENCY_BOUND}; {KEPT}",
            lambda: phases(seen, now_unix_ns() - FRESH_NS),
            LATENCY,
            ("phase", names.MODEL_LABEL),
        ),
        MetricDef(
            names.METRIC_SLOW_PHASES,
            "counter",
            "Sum of the phase times of slow requests: their time to first token is at or above the 99th percentile of their "
            f"model's last {WINDOW} of that scope; {KEPT}",
            lambda: slow_phases(seen),
            ("phase", names.MODEL_LABEL),
        ),
        MetricDef(
            names.METRIC_SLOW_REQUESTS,
            "counter",
            f"Slow requests, whose phase times {names.METRIC_SLOW_PHASES}_total sums; {KEPT}",
            lambda: by_label(
                dict.fromkeys((UNKNOWN, *sorted(counting.models.names)), 0) | seen.by_word(CounterKey.SLOW_REQUESTS)
            ),
            (names.MODEL_LABEL,),
        ),
        MetricDef(
            names.METRIC_JOINED,
            "counter",
            "Requests that a model answered, joined with evidence from every process on their path; divided by "
            f"{names.METRIC_COUNTED}_total they are the coverage; {KEPT}",
            lambda: _by_model(seen, CounterKey.JOINED, OUTCOMES, counting.models.names),
            ("outcome", names.MODEL_LABEL),
        ),
        MetricDef(
            names.METRIC_COUNTED,
            "counter",
            f"Requests that a model answered, as edge proxies count them, or decode engines if no edge counts; {KEPT}",
            lambda: by_label(dict.fromkeys((by.value for by in By), 0) | seen.by_word(CounterKey.COUNTED)),
            ("by",),
        ),
        MetricDef(
            names.METRIC_COVERAGE,
            "gauge",
            "Joined over counted requests in the last five settled minutes; absent if nothing was counted",
            lambda: _if_known(counting.coverage.ratio(now_unix_ns())),
        ),
        MetricDef(
            names.METRIC_STALLS,
            "counter",
            f"Stalls of streams (the longest of each), by cause; {KEPT}",
            lambda: _by_model(seen, CounterKey.STALLS, (cause.value for cause in StallCause), counting.models.names),
            ("cause", names.MODEL_LABEL),
        ),
        MetricDef(
            names.METRIC_FINDINGS,
            "counter",
            "Requests with a finding, each kind once a request; unexplained_failures: from an engine's counters, once an hour; "
            f"{KEPT}",
            lambda: by_label(dict.fromkeys(FINDINGS, 0) | seen.by_word(CounterKey.FINDINGS)),
            ("kind",),
        ),
        MetricDef(
            names.METRIC_SLOW_LINK,
            "gauge",
            "1 while hand-offs of the last ten minutes from source (producer) to target (consumer) show that their link is "
            f"slow; at most {MOST_PAIRS} pairs, by rate from {LEAST_TIMED} timed hand-offs on, once a minute",
            lambda: links.found,
            ("source", "target", "finding"),
        ),
        MetricDef(
            names.METRIC_CLOCK_BOUND,
            "gauge",
            f"Width of the clock bound of two hosts; the {CLOCK_PAIRS} widest of all bounded pairs",
            lambda: clock_bounds(clocks),
            ("host", "peer_host"),
        ),
    ]


def phases(seen: DurableCounters, oldest_unix_ns: int) -> dict[tuple[str, ...], Histogram]:
    """Return histograms of durations by phase and model.

    Exemplars name traces that are in the store, which keeps all of them.
    """
    return {words: found.histogram(oldest_unix_ns) for words, found in sorted(seen.durations(Timed.PHASES, 2).items())}


def slow_phases(seen: DurableCounters) -> dict[tuple[str, ...], float]:
    """Return seconds of slow requests by phase and model.

    Every phase that a request had starts at 0, so that the first slow request is an increase.
    """
    summed = dict.fromkeys(seen.durations(Timed.PHASES, 2), 0) | seen.by_words(CounterKey.SLOW_NS, 2)
    return {words: ns / 1e9 for words, ns in sorted(summed.items())}


def clock_bounds(clocks: HostClocks) -> dict[tuple[str, ...], float]:
    """Return the width of clock bounds in seconds, by host and peer host."""
    widths = {pair: interval.width_ns / 1e9 for pair, interval in clocks.intervals().items() if interval.width_ns is not None}
    return dict(sorted(widths.items(), key=lambda each: -each[1])[:CLOCK_PAIRS])


def _by_model(
    seen: DurableCounters, what: CounterKey, words: Iterable[str], models: Iterable[str]
) -> dict[tuple[str, ...], float]:
    """Return counts by word and model.

    Every known model starts at 0, so that its first failure is an increase; so do requests without a model.
    """
    every = tuple(words)
    counts: dict[tuple[str, ...], float] = {(word, model): 0.0 for model in (UNKNOWN, *sorted(models)) for word in every}
    for (word, model), count in seen.by_words(what, 2).items():
        key = word, model or UNKNOWN  # counts from before models were distinguished have none
        counts[key] = counts.get(key, 0.0) + count
    return counts


def _if_known(ratio: float | None) -> dict[tuple[str, ...], float]:
    return {} if ratio is None else {(): ratio}
