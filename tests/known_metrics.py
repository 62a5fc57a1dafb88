"""Which metrics there are, as the linter wants to know it: from the catalogue that is made of the code which exposes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from handrail.catalogue import sidecar_metrics
from handrail_alerts.promql import Metric, Type
from handrail_collector.metrics.page import collector_metrics


@cache
def known() -> Mapping[str, Metric]:
    """Of sidecars and collectors."""
    return {each.name: Metric(Type(each.type), frozenset(each.labels)) for each in (*sidecar_metrics(), *collector_metrics())}
