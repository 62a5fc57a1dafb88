"""The list of metrics that the linter knows.

It comes from the catalogue that is generated from the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from handrail_alerts.promql import PromMetric, Type
from handrail_collector.metrics.registry import collector_metrics
from handrail_sidecar.catalogue import sidecar_metrics


@cache
def known() -> Mapping[str, PromMetric]:
    """Return the metrics of sidecars and collectors."""
    return {each.name: PromMetric(Type(each.type), frozenset(each.labels)) for each in (*sidecar_metrics(), *collector_metrics())}
