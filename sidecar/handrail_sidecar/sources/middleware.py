"""Make one ``Exchange`` a request from the events of the middleware inside vLLM.

The proxy's own readers read them. Unlike a proxy, the middleware cannot see when the client had the bytes, and for how long it
took none. When the thread was late and parts were dropped, the exchange covers what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from handrail.plugin import events as words
from handrail.records import Exchange, Hint, Process, Source
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.plugin_merge.bounds import Bounded
from handrail_sidecar.proxy.exchange_observer import EndReason, ExchangeObserver, identify, observed_operation
from handrail_sidecar.proxy.head import RequestHead
from handrail_sidecar.proxy.response import Body
from handrail_sidecar.proxy.stats import ProxyStats

MAX_OPEN: Final = 10_000
_ENDINGS: Final = {"clean": EndReason.CLEAN, "client_gone": EndReason.CLIENT_GONE, "failed": EndReason.UPSTREAM_GONE}


@dataclass(slots=True)
class _OpenExchange:
    """One running exchange.

    The request's body is read once both ends of it are here.
    """

    observation: ExchangeObserver
    body_bytes: int
    head: list[bytes] = field(default_factory=list)
    tail: list[bytes] = field(default_factory=list)
    take: Body | None = None
    read: bool = False


class MiddlewareExchanges:
    """Open exchanges by boot and number."""

    def __init__(self, process: Process, live: LiveRequests | None = None) -> None:
        self._live = live
        self.stats = ProxyStats()
        self.open: Bounded[_OpenExchange] = Bounded(MAX_OPEN)
        self.unmatched = 0
        self._process = process

    def hear(self, boot: str, name: str, at_ns: int, offset_ns: int, v: Mapping[str, Any]) -> Exchange | None:
        """Take one event; return the exchange if the event ends it."""
        key = f"{boot}:{v['exchange']}"
        if name == words.HTTP_REQUEST:
            self._begin(key, offset_ns, v)
            return None
        found = self.open.get(key)
        if found is None:
            self.unmatched += 1
        elif name == words.HTTP_PART:
            (found.tail if v["tail"] else found.head).append(v["part"].encode("latin-1", "replace"))
        elif name == words.HTTP_HEAD:
            self._answer(found, v)
        elif name == words.HTTP_BODY:
            if found.take is not None:
                found.take(v["part"].encode("latin-1", "replace"), at_ns)
        elif name == words.HTTP_HELD:
            found.observation.held(v["begin_ns"], at_ns)
        elif name == words.HTTP_END:
            del self.open[key]
            return self._end(found, at_ns, v["ending"])
        return None

    def open_since(self) -> Iterator[int]:
        """Arrival of each observed request that has not ended, on the monotonic clock."""
        return (found.observation.arrival_ns for found in self.open.values() if found.observation.operation is not None)

    def close_boot(self, boot: str, at_ns: int) -> list[Exchange]:
        """Drop the exchanges of an API server that is gone.

        Its connections are gone with it.
        """
        lost = [key for key in self.open if key.startswith(f"{boot}:")]
        return [self._end(self.open.pop(key), at_ns, "failed") for key in lost]

    def _begin(self, key: str, offset_ns: int, v: Mapping[str, Any]) -> None:
        headers = [
            (name.encode("latin-1", "replace"), str(value).encode("latin-1", "replace"))
            for name, values in v["headers"].items()
            if isinstance(values, list)
            for value in values
        ]
        head = RequestHead(
            raw=b"\r\n\r\n",
            method=v["method"].encode("latin-1", "replace"),
            target=v["path"].encode("latin-1", "replace"),
            headers=tuple(headers),
            content_length=None,
            chunked=False,
        )
        self.stats.requests += 1
        who, operation = identify(head), observed_operation(head)
        observation = ExchangeObserver(
            process=self._process,
            head=head,
            identity=who,
            operation=operation,
            arrival_ns=v["arrival_ns"],
            arrival_unix_ns=v["arrival_ns"] + offset_ns,
            stats=self.stats,
            live=self._live.begin(who.ids.trace_id) if self._live is not None and operation is not None else None,
        )
        self.open.put(key, _OpenExchange(observation, v["body_bytes"]))

    def _answer(self, found: _OpenExchange, v: Mapping[str, Any]) -> None:
        self._read_request(found)
        given = ((b"content-type", v["content_type"]), (b"content-encoding", v["content_encoding"]))
        headers = [(name, value.encode("latin-1", "replace")) for name, value in given if value is not None]
        found.take = found.observation.response_head(v["status"], headers)

    def _read_request(self, found: _OpenExchange) -> None:
        if found.read:
            return
        found.read = True
        head, tail = b"".join(found.head), b"".join(found.tail)
        found.observation.request_body(head)
        missing = found.body_bytes - len(head) - len(tail)
        if missing > 0:
            found.observation.request_body_missing(missing)
        found.observation.request_body(tail)
        found.observation.request_done_ns = found.observation.arrival_ns

    def _end(self, found: _OpenExchange, at_ns: int, how: str) -> Exchange:
        self._read_request(found)
        record = found.observation.record(_ENDINGS.get(how, EndReason.UNREADABLE), at_ns)
        self.stats.outcomes[record.outcome] += 1
        hints = tuple(hint for hint in record.hints if hint is not Hint.CLIENT_SLOW)
        return replace(record, source=Source.MIDDLEWARE, forwarded_ns=None, request_done_ns=None, hints=hints)
