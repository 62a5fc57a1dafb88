"""Check a metric's name, labels and help against the conventions of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Collection

from handrail.metrics.catalogue import CatalogueMetric

_NOT_BASE_UNITS = re.compile(r"_(milliseconds|ms|us|ns|kb|mb|percent|minutes)(_total)?$")


RESERVED_LABELS = frozenset({"instance", "job", "le", "request_id", "trace_id"})
"""Labels that scrapers set, or that would make a series for each request."""


def naming_problems(metric: CatalogueMetric, reserved_labels: Collection[str] = RESERVED_LABELS) -> list[str]:
    """Return what is wrong with a metric, one line each."""
    problems = {
        "the name is not handrail_ and lower case": not re.fullmatch(r"handrail_[a-z0-9_]+", metric.name),
        "a counter, and no other metric, ends in _total": metric.name.endswith("_total") is not (metric.type == "counter"),
        "a label is reserved": not set(reserved_labels).isdisjoint(metric.labels),
        "the help is empty": not metric.help,
        "the help ends in a full stop": metric.help.endswith("."),
        "the unit is no base unit": bool(_NOT_BASE_UNITS.search(metric.name)),
        "the help of a histogram does not name its buckets": metric.type == "histogram" and "Buckets" not in metric.help,
    }
    return [f"{metric.name}: {problem}" for problem, found in problems.items() if found]
