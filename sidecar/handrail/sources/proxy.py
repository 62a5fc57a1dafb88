"""The proxy source: an HTTP/1.1 reverse proxy in front of one router or engine, one record a generation request.

Usable at the edge or in front of P or D. What it does to the bytes that pass: docs/decisions/0002-proxy-on-protocols.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from handrail.descriptors import DescriptorBudget
from handrail.live.requests import LiveRequests
from handrail.proxy.acceptor import HANDSHAKE_S, Acceptor, AcceptStats
from handrail.proxy.admission import Admission
from handrail.proxy.client import ClientSide
from handrail.proxy.relay import Relay
from handrail.proxy.settings import ProxySettings
from handrail.proxy.stats import ProxyStats
from handrail.sources.base import Sink

_BACKLOG = 1024
_TICK_S = 1.0

log = logging.getLogger(__name__)


class ProxySource:
    """Listens, relays, observes; ``stats`` is what it counts and ``address`` where it listens once started.

    Runs on the event loop that calls ``start``; uvloop's is the one its costs were measured on.
    """

    def __init__(
        self,
        settings: ProxySettings,
        sink: Sink,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        live: LiveRequests | None = None,
        budget: DescriptorBudget | None = None,
    ) -> None:
        self.settings = settings
        self.stats = ProxyStats()
        self.admission = Admission(budget, settings.max_streams)
        self.address = (settings.listen_host, settings.listen_port)
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._live = live
        self._relay: Relay | None = None
        self._acceptor: Acceptor | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Bind and listen. Raises ``OSError`` where the address cannot be bound; the upstream need not be up yet."""
        settings = self.settings
        relay = Relay(
            settings,
            self._sink,
            self.stats,
            clock=self._clock,
            wall=self._wall,
            live=self._live,
            admission=self.admission,
        )
        handshake_s = min(HANDSHAKE_S, settings.head_timeout_s)
        acceptor = Acceptor(
            lambda accepted: ClientSide(relay, accepted), relay, tls=settings.tls, handshake_s=handshake_s, backlog=_BACKLOG
        )
        self.address = await acceptor.start(settings.listen_host, settings.listen_port)
        relay.freed = acceptor.resume
        self._relay, self._acceptor = relay, acceptor
        self._tick()
        log.info("proxy listens on %s:%d for %s", *self.address, self.settings.upstream)

    def open_since(self) -> Iterator[int]:
        """When each observed request that has not ended arrived, on the monotonic clock."""
        return iter(()) if self._relay is None else self._relay.open_since()

    @property
    def accepts(self) -> AcceptStats:
        """What accepting connections met."""
        return AcceptStats() if self._acceptor is None else self._acceptor.stats

    def problem(self) -> str:
        """Why no more work should be sent here, in one line for /readyz; '' while there is room."""
        return self.admission.problem()

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        """Stop listening, close what is idle, let exchanges end for up to ``drain_seconds``, then abort and record the rest."""
        relay, self._relay = self._relay, None
        if relay is None:
            return
        assert self._acceptor is not None
        self._acceptor.close()
        relay.draining = True
        for connection in tuple(relay.connections):
            connection.drain()
        seconds = self.settings.drain_seconds if drain_seconds is None else drain_seconds
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(relay.empty.wait(), seconds)
        if relay.connections:
            log.warning("proxy aborts %d connections that did not end within %g s", len(relay.connections), seconds)
            for connection in tuple(relay.connections):
                connection.abort()
            await relay.empty.wait()
        relay.flush()
        if self._timer is not None:
            self._timer.cancel()
        log.info("proxy on %s:%d is closed", *self.address)

    def _tick(self) -> None:
        relay = self._relay
        if relay is not None:
            relay.tick()
        elif self._timer is None:
            return
        self._timer = asyncio.get_running_loop().call_later(min(_TICK_S, self.settings.idle_after_finish_s / 4), self._tick)
