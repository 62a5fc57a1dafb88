"""The proxy source: an HTTP/1.1 reverse proxy in front of one router or engine.

It makes one record a generation request.
It works at the edge or in front of P or D. What it does to the bytes that pass: docs/decisions/0002-proxy-on-protocols.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator

from handrail.records import Sink
from handrail.runtime.accepting import Acceptor
from handrail.runtime.descriptors import DescriptorBudget
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.proxy.admission import Admission
from handrail_sidecar.proxy.client import ClientSide
from handrail_sidecar.proxy.relay import Relay
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.proxy.stats import ProxyStats

_TICK_S = 1.0
HANDSHAKE_S = 10.0

log = logging.getLogger(__name__)


class ProxySource:
    """Listens, relays and observes.

    ``stats`` are its counters; ``address`` is where it listens once started.
    It runs on the event loop that calls ``start``; its costs were measured on uvloop's.
    """

    def __init__(
        self,
        settings: ProxySettings,
        sink: Sink,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
        stats: ProxyStats | None = None,
        live: LiveRequests | None = None,
        budget: DescriptorBudget | None = None,
    ) -> None:
        self.settings = settings
        self.stats = stats if stats is not None else ProxyStats()
        self.ticks = 0  # ticks that checked limits and postponed reads
        self.admission = Admission(budget, settings.max_streams)
        self.address = (settings.listen_host, settings.listen_port)
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._live = live
        self._relay: Relay | None = None
        self._acceptor: Acceptor | None = None
        self._opening: set[asyncio.Task[None]] = set()  # accepted connections without a transport yet
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Bind and listen; the upstream need not be up yet.

        Raises ``OSError`` when the address cannot be bound.
        """
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
        self._acceptor = Acceptor(self.admission, self._take)
        self.address = self._acceptor.start(settings.listen_host, settings.listen_port)
        self._relay, relay.freed = relay, self._acceptor.wake
        self._tick()
        log.info("proxy listens on %s:%d for %s", *self.address, self.settings.upstream)

    def open_since(self) -> Iterator[int]:
        """Arrival of each observed request that has not ended, on the monotonic clock."""
        return iter(()) if self._relay is None else self._relay.open_since()

    def problem(self) -> str:
        """Why no more work should come here, in one line for /readyz.

        '' while there is room.
        """
        return self.admission.problem()

    async def shutdown(self, drain_seconds: float) -> None:
        """Stop listening, close idle connections and let exchanges end.

        After ``drain_seconds`` it aborts and records the rest.
        """
        relay, self._relay = self._relay, None
        if relay is None:
            return
        assert self._acceptor is not None
        self._acceptor.close()
        await asyncio.sleep(0)  # a task that never ran could not close its socket
        for task in tuple(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        relay.draining = True
        for connection in tuple(relay.connections):
            connection.drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(relay.empty.wait(), drain_seconds)
        if relay.connections:
            log.warning("proxy aborts %d connections that did not end within %g s", len(relay.connections), drain_seconds)
            for connection in tuple(relay.connections):
                connection.abort()
            await relay.empty.wait()
        relay.flush()
        if self._timer is not None:
            self._timer.cancel()
        log.info("proxy on %s:%d is closed", *self.address)

    def _take(self, accepted: socket.socket, _peer: str) -> None:
        relay = self._relay
        assert relay is not None
        with contextlib.suppress(OSError):  # the peer may have left again
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._open(ClientSide(relay, accepted), accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, client: ClientSide, accepted: socket.socket) -> None:
        tls = self.settings.tls
        handshake_s = None if tls is None else min(HANDSHAKE_S, self.settings.head_timeout_s)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: client, accepted, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # no TLS was spoken, or not in time, or the peer is gone
            self.stats.handshakes_failed += 1
        finally:
            if not client.opened:
                accepted.close()
                self.admission.closed(stream=False, owed=False)
                self._wake()

    def _wake(self) -> None:
        if self._acceptor is not None:
            self._acceptor.wake()

    def _tick(self) -> None:
        relay = self._relay
        if relay is not None:
            self.ticks += 1
            try:
                relay.tick()
            except Exception:  # an error at one connection must not end the check of all others
                self.stats.observer_errors += 1
                if self.stats.observer_errors == 1:
                    log.exception("checking the proxied connections failed")
        elif self._timer is None:
            return
        self._timer = asyncio.get_running_loop().call_later(min(_TICK_S, self.settings.idle_after_finish_s / 4), self._tick)
