"""Counters of the proxy about itself.

They are plain integers; a reader takes them at its own pace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from handrail.records import Outcome

REFUSED: Final = ("streams", "descriptors")
"""Reasons for refusing a stream.

``streams``: all that fit are open. ``descriptors``: the system had no descriptor, port or memory for the upstream connection.
"""

TIMEOUTS: Final = ("head", "idle", "body")
"""Reasons for ending a slow client's connection.

It was too slow with its request's head, with the next request, or with its request's body.
"""


@dataclass(slots=True)
class ProxyStats:
    """Counters since start; only ``open_*`` go down.

    Only the proxy's event loop writes them.
    """

    connections: int = 0
    open_connections: int = 0
    upstream_connections: int = 0
    requests: int = 0  # heads that were read
    passed: int = 0  # of these: not one of the observed paths
    protocol_errors: int = 0  # refused before they became a request: malformed, HTTP/2 preface, CONNECT, head too long
    refused_bodies: int = 0  # 413
    upstream_unreadable: int = 0  # responses that no HTTP parser understands: passed on, end unknown
    connect_failures: int = 0
    tunnels: int = 0  # 101 Switching Protocols
    aborted: int = 0  # requests cut by the sidecar's own shutdown
    client_bytes: int = 0  # read from clients
    upstream_bytes: int = 0  # read from the upstream
    reads_paused: int = 0  # times the upstream was not read because the client took nothing
    observer_errors: int = 0  # exceptions while observing; the bytes went on
    refused_streams: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSED, 0))  # 503, by what was lacking
    # client connections that the proxy ended
    timeouts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIMEOUTS, 0))
    handshakes_failed: int = 0  # TLS: not spoken, refused, or not done in time
    displaced: int = 0  # idle client connections that were closed for a new one
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: dict.fromkeys(Outcome, 0)
    )  # observed requests, by how they ended

    def open_requests(self) -> int:
        """Observed requests that have not ended."""
        return self.requests - self.passed - sum(self.outcomes.values())
