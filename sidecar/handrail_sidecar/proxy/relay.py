"""State that all connections of one proxy share.

It holds settings, counters and running request ids, and it passes records to the sink.
A proxied connection has two sides, ``client.ClientSide`` and ``upstream.UpstreamSide``. They are paired: each client connection
has its own upstream connection, opened at its first request, and the end of either ends the other. There is no pool, so
keep-alive, stale connections and ``Connection`` headers behave as without the proxy. Why protocols and not aiohttp:
docs/decisions/0002-proxy-on-protocols.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from heapq import nsmallest
from operator import itemgetter
from typing import Protocol

from handrail.records import Hint, Sink
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.proxy.admission import Admission
from handrail_sidecar.proxy.exchange_observer import EndReason, ExchangeObserver, identify, observed_operation
from handrail_sidecar.proxy.head import RequestHead
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.proxy.stats import ProxyStats

log = logging.getLogger(__name__)

ENDED_DELAY_S, ENDED_MOST = 0.005, 64
"""Delay of a record after its exchange ended, and most records that wait.

A record takes 90 us. Answers that end together (as those of one batch do) would otherwise delay the next requests by as many
records.
"""


LOOK_WITHIN_NS = 10**9
"""Longest wait of a read that was put off, in ns.

The next tick after it processes the read, so that /metrics shows it then.
"""

SPARE_IDLE_S = 5.0
"""Idle time after which a client connection may be closed for a new stream.

It applies when no more streams fit. vLLM itself keeps no idle connection longer.
"""

SPARES = 64
"""Most idle connections found by one search, which looks at all connections."""

RECOVERED_S = 5.0
"""Time without a refusal, and with room, after which the shortage counts as over.

One shortage is logged once, however often there is just not enough room.
"""

_WHY = {
    "streams": "no more streams fit (raise the hard limit of descriptors: ulimit -Hn, LimitNOFILE=; or proxy.max_streams)",
    "descriptors": "the system has no descriptor, memory or port for a connection to the upstream",
}


class Connection(Protocol):
    """A client's connection as the relay uses it: ``client.ClientSide``."""

    flight: ExchangeObserver | None
    response_done: bool

    @property
    def idle_ns(self) -> int | None: ...

    def look_at_limits(self, now: int) -> None: ...

    def give_way(self) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...


class Relay:
    """Shared state of the connections of one proxy. One event loop owns it."""

    def __init__(
        self,
        settings: ProxySettings,
        sink: Sink,
        stats: ProxyStats,
        *,
        clock: Callable[[], int],
        wall: Callable[[], int],
        live: LiveRequests | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.settings = settings
        self.admission = admission or Admission()
        self.stats = stats
        self.clock = clock
        self.wall = wall
        self.draining = False
        self.freed: Callable[[], None] = lambda: None  # called when a connection ended
        self.connections: set[Connection] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self._sink = sink
        self._live = live
        self._ended: list[tuple[ExchangeObserver, EndReason, int]] = []  # records to be written
        self._in_flight: dict[bytes, list[ExchangeObserver]] = {}  # running requests by X-Request-Id
        self._refusing = 0  # streams refused since there last was room
        self._refused_ns = 0
        self._spare: list[Connection] = []  # idle at the last search; the longest idle is last
        self._searched = False  # the search since the last tick found no idle connection

    # --- streams ----------------------------------------------------------------------------------------------------------

    def stream(self) -> bool:
        """Whether one more client connection may be a stream.

        It may take the place of one that has long been idle.
        """
        if self.admission.stream():
            return True
        if self._searched:
            return False
        idle = self._idle()
        if idle is None:
            self._searched = True
            return False
        self.stats.displaced += 1
        idle.give_way()
        self.admission.stream_anyway()
        return True

    def _idle(self) -> Connection | None:
        """The stream that has been idle for longest, if that is long enough.

        Idle: its client owes a request.
        """
        latest_ns = self.clock() - int(SPARE_IDLE_S * 1e9)
        if not self._spare:
            found = [(each.idle_ns, each) for each in self.connections if each.idle_ns is not None]
            self._spare = [each for _, each in nsmallest(SPARES, found, key=itemgetter(0))][::-1]
        while self._spare:
            idle = self._spare.pop()
            if idle.idle_ns is not None and idle.idle_ns <= latest_ns:
                return idle
        return None

    def refused(self, reason: str) -> None:
        """Count a stream that got 503; log the first one since there was room."""
        self.stats.refused_streams[reason] += 1
        self._refusing += 1
        self._refused_ns = self.clock()
        if self._refusing == 1:
            log.warning(
                "proxy refuses streams with 503: %s; %d are open; further refusals are only counted, in "
                "handrail_sidecar_proxy_refused_streams_total",
                _WHY[reason],
                self.admission.streams,
            )

    def _recovered(self, now: int) -> None:
        if self._refusing and now - self._refused_ns >= RECOVERED_S * 1e9 and not self.admission.crowded:
            log.info("proxy accepts streams again; it refused %d with 503", self._refusing)
            self._refusing = 0

    # --- records ----------------------------------------------------------------------------------------------------------

    def begin(self, head: RequestHead, arrival_ns: int, arrival_unix_ns: int) -> ExchangeObserver:
        """Start to observe one request and choose its head for the upstream."""
        self.stats.requests += 1
        operation, settings = observed_operation(head), self.settings
        observed = operation is not None
        self.stats.passed += not observed
        who = identify(
            head,
            add_request_id=observed and settings.request_id == "add",
            set_trace_context=observed and settings.trace_context == "set",
            exported=settings.engine_exports_to_us,
        )
        flight = ExchangeObserver(
            process=settings.process,
            head=head,
            identity=who,
            operation=operation,
            arrival_ns=arrival_ns,
            arrival_unix_ns=arrival_unix_ns,
            stats=self.stats,
            live=self._live.begin(who.ids.trace_id) if self._live is not None and observed else None,
        )
        raw = flight.raw_request_id
        if raw is not None:
            running = self._in_flight.setdefault(raw, [])
            running.append(flight)
            if len(running) > 1:  # two requests share this id, so the evidence cannot be assigned to either
                for one in running:
                    one.hint(Hint.DUPLICATE_REQUEST_ID)
        return flight

    def finish(self, flight: ExchangeObserver, ending: EndReason, at_ns: int) -> None:
        """Have the record of ``flight`` written, once; later calls do nothing."""
        if flight.recorded:
            return
        flight.recorded = True
        raw = flight.raw_request_id
        if raw is not None:
            running = self._in_flight[raw]
            running.remove(flight)
            if not running:
                del self._in_flight[raw]
        if flight.operation is None and not self.settings.record_all:
            return
        self._ended.append((flight, ending, at_ns))
        if len(self._ended) >= ENDED_MOST:
            self.flush()
        elif len(self._ended) == 1:
            asyncio.get_running_loop().call_later(ENDED_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write the records of the exchanges that ended."""
        ended, self._ended = self._ended, []
        for flight, ending, at_ns in ended:
            try:
                record = flight.record(ending, at_ns)
            except Exception:  # a bug in one record must not cost the others
                self.stats.observer_errors += 1
                continue
            if flight.operation is not None:
                self.stats.outcomes[record.outcome] += 1
            self._sink(record)

    def open_since(self) -> Iterator[int]:
        """Arrival of each observed request that has not ended, on the relay's clock."""
        for connection in self.connections:
            flight = connection.flight
            if flight is not None and flight.operation is not None and not flight.recorded:
                yield flight.arrival_ns

    def tick(self) -> None:
        """Process reads that were put off for long, and record streams that fell silent.

        Such a stream sent its finish reason and then neither ended nor went on (case E06b). The client is left alone.
        """
        now = self.clock()
        idle_ns = int(self.settings.idle_after_finish_s * 1e9)
        self._searched = False
        self._spare.clear()
        self._recovered(now)
        for connection in tuple(self.connections):
            connection.look_at_limits(now)
            flight = connection.flight
            if flight is not None:
                flight.overdue(now - LOOK_WITHIN_NS)
            if flight is None or flight.recorded or flight.last_read_ns is None or now - flight.last_read_ns < idle_ns:
                continue
            if flight.finish_seen and not connection.response_done:
                flight.hint(Hint.CLOSE_MISSING)
                self.finish(flight, EndReason.IDLE, flight.last_read_ns)
