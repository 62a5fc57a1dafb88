"""Which metrics there are, as the linter wants to know it: from the catalogue that is made of the code which exposes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from handrail.catalogue import sidecar_metrics
from handrail_alerts.promql import Metric, Type

_COLLECTOR: Mapping[str, Metric] = {
    name: Metric(Type.HISTOGRAM if kind == "h" else Type.COUNTER if kind == "c" else Type.GAUGE, frozenset(labels))
    for kind, name, *labels in (
        ("g", "handrail_trace_coverage_ratio"),
        ("h", "handrail_phase_seconds", "phase", "model_name"),
        ("c", "handrail_slow_phase_seconds_total", "phase", "model_name"),
        ("c", "handrail_slow_requests_total", "model_name"),
        ("c", "handrail_findings_total", "kind"),
        ("c", "handrail_stalls_total", "cause", "model_name"),
        ("g", "handrail_link_slow", "source", "target", "finding"),
        ("g", "handrail_clock_bound_seconds", "host", "peer_host"),
        *(
            ("c", f"handrail_collector_{name}_total")
            for name in (
                "rejected_items",
                "unreadable_spans",
                "faults",
                "refused_requests",
                "cpu_seconds",
                "spans",
                "rows",
                "ambiguous_joins",
            )
        ),
        ("c", "handrail_collector_joins_total", "how"),
        *(
            ("g", f"handrail_collector_{name}")
            for name in ("journal_lag_seconds", "resident_memory_bytes", "store_bytes", "journal_size_bytes")
        ),
    )
}


@cache
def known() -> Mapping[str, Metric]:
    return {**{metric.name: Metric(Type(metric.type), frozenset(metric.labels)) for metric in sidecar_metrics()}, **_COLLECTOR}
