"""Metrics of a process's descriptors and of the connections to its listeners."""

from __future__ import annotations

from handrail import conventions as names
from handrail.metrics.registry import MetricDef
from handrail.runtime.connections import Gates


def connection_rows(gates: Gates) -> list[MetricDef]:
    """Rows for both processes alike."""
    prefix, budget = names.METRIC_CONNECTIONS, gates.budget
    return [
        MetricDef(f"{names.METRIC_DESCRIPTORS}_open", "gauge", "Open file descriptors of this process", budget.in_use),
        MetricDef(
            f"{names.METRIC_DESCRIPTORS}_limit",
            "gauge",
            "Most file descriptors of this process (the soft limit, which the process raises to the hard limit at its start)",
            lambda: budget.limit,
        ),
        MetricDef(
            f"{prefix}_open",
            "gauge",
            "Open connections of a listener",
            lambda: {(gate.name,): float(gate.open) for gate in gates.all},
            ("listener",),
        ),
        MetricDef(
            f"{prefix}_refused",
            "counter",
            "Connections refused: their address (peer) or the listener is at its bound, or no descriptor was left",
            lambda: {(gate.name, why.value): float(count) for gate in gates.all for why, count in gate.refused.items()},
            ("listener", "reason"),
        ),
        MetricDef(
            f"{prefix}_expired",
            "counter",
            "Connections that a time limit ended: on the TLS handshake, a request's head, or idleness",
            lambda: {(gate.name, why.value): float(count) for gate in gates.all for why, count in gate.expired.items()},
            ("listener", "reason"),
        ),
        MetricDef(
            f"{prefix}_malformed",
            "counter",
            "Connections to an HTTP listener that sent something other than HTTP, or a request that breaks its rules",
            lambda: {(gate.name,): float(gate.malformed) for gate in gates.all},
            ("listener",),
        ),
        MetricDef(
            f"{prefix}_accept_pauses",
            "counter",
            "Quarters of a second in which a listener accepted no connection because descriptors ran short",
            lambda: {(gate.name,): float(gate.pauses) for gate in gates.all},
            ("listener",),
        ),
    ]
