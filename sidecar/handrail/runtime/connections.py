"""Bounds on a listener's connections: their number, per peer, and silent time.

A connection costs a descriptor and memory before its sender has authenticated, so TLS, client certificates and tokens do not
bound it; a ``Gate`` does. A connection over a bound is refused at once. When the descriptors run out, none is refused: accepting
pauses, and new connections wait in the system's queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail import conventions as names
from handrail.config.listeners import ConnectionsConfig
from handrail.metrics.registry import MetricDef
from handrail.runtime.descriptors import DescriptorBudget
from handrail.runtime.handshakes import HandshakeQueue

log = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 4096
"""Most connections of one listener, however high the limit of descriptors is.

The configuration may set another number.
"""

ONE_PEER: Final = 64
"""Least bound on one peer's connections.

A peer may hold this many at least, unless the whole listener may hold fewer.
"""

QUIET_S: Final = 60.0
"""Time without a refusal after which the next one is logged again."""


class Refusal(str, Enum):
    """Reason why a connection was not taken."""

    PEER = "peer"  # its address holds as many as it may
    LISTENER = "listener"  # the listener holds as many as it may
    DESCRIPTORS = "descriptors"  # taken, and then no descriptor was left to serve it


class Expiry(str, Enum):
    """Time limit that ended a connection."""

    HANDSHAKE = "handshake"
    HEAD = "head"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one listener. ``descriptors``: how many one connection takes."""

    listener: int = 1024
    peer: int = 256
    handshake_s: float = 10.0
    head_s: float = 10.0
    idle_s: float = 300.0
    descriptors: int = 1

    @classmethod
    def of(cls, config: ConnectionsConfig, share: float, *, descriptors: int = 1) -> Bounds:
        """Bounds as configured, else from ``share``.

        ``share``: the descriptors that the listener may use.
        """
        default = max(1, min(MOST_CONNECTIONS, int(share) // descriptors))
        listener = default if config.max_per_listener is None else config.max_per_listener
        peer = max(listener // 4, ONE_PEER) if config.max_per_peer is None else config.max_per_peer
        return cls(
            listener=listener,
            peer=min(peer, listener),
            handshake_s=config.handshake_timeout.seconds,
            head_s=config.head_timeout.seconds,
            idle_s=config.idle_timeout.seconds,
            descriptors=descriptors,
        )


class Gate:
    """Decide which connections one listener takes, and count them.

    The listener's loop owns it. ``name``: of the listener, in the log and in metrics. Every ``admit`` that returns None is
    followed by one ``leave``. ``handshakes``: queue of the TLS handshakes of admitted connections; None: a queue of its own.
    """

    def __init__(
        self,
        name: str,
        bounds: Bounds,
        budget: DescriptorBudget,
        *,
        handshakes: HandshakeQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.bounds = bounds
        self.handshakes = HandshakeQueue() if handshakes is None else handshakes
        self.open = 0
        self.paused = False
        self.pauses = 0
        self.malformed = 0  # the sent bytes are not the listener's protocol
        self.refused = dict.fromkeys(Refusal, 0)
        self.expired = dict.fromkeys(Expiry, 0)
        self._budget = budget
        self._clock = clock
        self._peers: dict[str, int] = {}
        self._seen_at: dict[str, float] = {}

    def has_room(self) -> bool:
        """Whether the descriptors allow one more connection now."""
        return self._budget.free() >= self.bounds.descriptors

    def admit(self, peer: str) -> Refusal | None:
        """Take one connection from the address ``peer``, or return the refusal."""
        held = self._peers.get(peer, 0)
        if self.open >= self.bounds.listener:
            self.refuse(
                Refusal.LISTENER, f"all of its {self.bounds.listener} connections are in use (connections.max_per_listener)"
            )
            return Refusal.LISTENER
        if held >= self.bounds.peer:
            self.refuse(Refusal.PEER, f"{peer} holds {held} connections (connections.max_per_peer)")
            return Refusal.PEER
        self._peers[peer] = held + 1
        self.open += 1
        self._budget.take(self.bounds.descriptors)
        return None

    def leave(self, peer: str) -> None:
        """Note that a taken connection is closed."""
        held = self._peers[peer] - 1
        if held:
            self._peers[peer] = held
        else:
            del self._peers[peer]
        self.open -= 1
        self._budget.give_back(self.bounds.descriptors)

    def refuse(self, why: Refusal, detail: str) -> None:
        """Count a refusal; log it where there was none of its kind for a minute."""
        before = self.refused[why]
        self.refused[why] = before + 1
        if self._news(why.value):
            log.warning(
                "%s refuses connections: %s; further ones are counted in handrail_connections_refused_total (%d before)",
                self.name,
                detail,
                before,
            )

    def pause(self, why: str) -> None:
        """Note that accepting pauses; log it where it did not for a minute."""
        self.paused = True
        self.pauses += 1
        if self._news("pause"):
            log.warning("%s pauses accepting: %s; new connections wait", self.name, why)

    def resume(self) -> None:
        """Note that accepting goes on."""
        self.paused = False

    def shortage(self) -> str:
        """Name of the resource that is short, for ``pause``."""
        budget = self._budget
        return f"{budget.in_use()} of {budget.limit} descriptors are in use and {budget.reserved} are reserved for files"

    def _news(self, kind: str) -> bool:
        now = self._clock()
        seen = self._seen_at.get(kind)
        self._seen_at[kind] = now
        return seen is None or now - seen >= QUIET_S


class Gates:
    """Gates of one process.

    ``shares``: of the descriptors that are not reserved, by listener, with the number that one connection takes.
    """

    def __init__(self, config: ConnectionsConfig, budget: DescriptorBudget, shares: Mapping[str, tuple[float, int]]) -> None:
        self.budget = budget
        self.all: list[Gate] = []
        self._config = config
        self._shares = shares
        self._handshakes = HandshakeQueue()  # one for all: they share a loop

    def gate(self, name: str) -> Gate:
        """Gate of one listener; call it once for each."""
        share, descriptors = self._shares[name]
        usable = self.budget.limit - self.budget.reserved
        bounds = Bounds.of(self._config, share * usable, descriptors=descriptors)
        gate = Gate(name, bounds, self.budget, handshakes=self._handshakes)
        self.all.append(gate)
        return gate

    def problem(self) -> str:
        """One line for /readyz, or ''."""
        return self.budget.problem()


def own_gate(name: str, *, descriptors: int = 1) -> Gate:
    """Gate for a single listener, with the current limit of descriptors."""
    budget = DescriptorBudget.of_process(reserved=64)
    share = (budget.limit - budget.reserved) / 2
    return Gate(name, Bounds.of(ConnectionsConfig(), share, descriptors=descriptors), budget)


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
