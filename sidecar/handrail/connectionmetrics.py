"""What a process says of its descriptors, and of who connects to its listeners."""

from __future__ import annotations

from handrail import conventions as names
from handrail.connections import Gates
from handrail.selfmetrics import Row


def connection_rows(gates: Gates) -> list[Row]:
    """Of both processes alike."""
    prefix, budget = names.METRIC_CONNECTIONS, gates.budget
    return [
        Row(f"{names.METRIC_DESCRIPTORS}_open", "gauge", "Open file descriptors of this process", budget.in_use),
        Row(
            f"{names.METRIC_DESCRIPTORS}_limit",
            "gauge",
            "The most that it may open (the soft limit, which is raised to the hard one at start)",
            lambda: budget.limit,
        ),
        Row(
            f"{prefix}_open",
            "gauge",
            "Connections that a listener holds",
            lambda: {(gate.name,): float(gate.open) for gate in gates.all},
            ("listener",),
        ),
        Row(
            f"{prefix}_refused",
            "counter",
            "Connections that were not taken: their address (peer) or the listener holds as many as it may, or there was no "
            "descriptor left",
            lambda: {(gate.name, why.value): float(count) for gate in gates.all for why, count in gate.refused.items()},
            ("listener", "reason"),
        ),
        Row(
            f"{prefix}_expired",
            "counter",
            "Connections ended by a time limit: of the TLS handshake, of a request's head, of idleness",
            lambda: {(gate.name, why.value): float(count) for gate in gates.all for why, count in gate.expired.items()},
            ("listener", "reason"),
        ),
        Row(
            f"{prefix}_malformed",
            "counter",
            "Connections to a listener of HTTP that sent something else, or a request that breaks its rules",
            lambda: {(gate.name,): float(gate.malformed) for gate in gates.all},
            ("listener",),
        ),
        Row(
            f"{prefix}_accept_pauses",
            "counter",
            "Quarters of a second in which a listener accepted nobody, because descriptors were short",
            lambda: {(gate.name,): float(gate.pauses) for gate in gates.all},
            ("listener",),
        ),
    ]
