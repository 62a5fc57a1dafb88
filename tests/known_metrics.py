"""Which metrics there are, as the lint wants to know it: from the catalogue that is made of the code which exposes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

from handrail.catalogue import Metric, sidecar_metrics
from handrail_collector.catalogue import collector_metrics
from handrail_dashboards.lint import Known


@cache
def known() -> Mapping[str, Known]:
    return {metric.name: _known(metric) for metric in (*sidecar_metrics(), *collector_metrics())}


def _known(metric: Metric) -> Known:
    return Known(cast("str", metric.type), frozenset(metric.labels))  # type: ignore[arg-type]
