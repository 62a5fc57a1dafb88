"""Observe one proxied request and make its record at the end.

It does no I/O: bytes and stamps come in. Stamps are readings of the proxy's monotonic clock; the record counts them from the
request's arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

from handrail import identity, trace_context
from handrail.records import Exchange, Hint, Outcome, Process, ResponseFacts, Source, SpanIds
from handrail_sidecar.live_metrics.requests import LiveRequest
from handrail_sidecar.proxy.head import RequestHead, rewrite
from handrail_sidecar.proxy.request_body import RequestFacts, RequestInspector, operation_of
from handrail_sidecar.proxy.response import Body
from handrail_sidecar.proxy.response_reader import End, ResponseReader, StreamFacts
from handrail_sidecar.proxy.stats import ProxyStats

CLIENT_SLOW_NS = 100_000_000
"""Total time without progress from which a client counts as slow, in ns.

It is longer than any stall of a healthy path.
"""


HELD_LIMIT = 64
"""Most intervals kept of one response in which the client took nothing.

Nothing of the response was read in such an interval. Later ones are not kept.
"""

LATE_READS = 16
LATE_BYTES = 4096
"""Reads of a delivered stream that are processed together, and the size limit.

Once its first content is delivered, a stream is read this many reads at a time; a larger read is processed at once.
Every read has its stamp already, so no figure changes. Between two system calls the reader finds the processor's caches cold:
read by read it cost 7 us a token of 64 paced streams, 2 us in a row (tests/bench/bench_proxy.py).
"""


class EndReason(Enum):
    """How the proxy saw the exchange end."""

    CLEAN = "clean"  # the response is complete
    CLIENT_GONE = "client_gone"
    UPSTREAM_GONE = "upstream_gone"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"  # the proxy ended it
    IDLE = "idle"  # silent after its finish reason; still open
    UNREADABLE = "unreadable"  # not HTTP, so its end is unknown
    SHUTDOWN = "shutdown"  # cut by the proxy's own shutdown


_READER_ENDS = {
    EndReason.CLEAN: End.CLEAN,
    EndReason.CLIENT_GONE: End.CLIENT_GONE,
    EndReason.UPSTREAM_GONE: End.UPSTREAM_CUT,
    EndReason.IDLE: End.IDLE_AFTER_FINISH,
}
_PLAIN_OUTCOMES = {
    EndReason.CLIENT_GONE: Outcome.CLIENT_DISCONNECT,
    EndReason.UPSTREAM_GONE: Outcome.UPSTREAM_DISCONNECT,
    EndReason.UNREACHABLE: Outcome.UPSTREAM_UNREACHABLE,
    EndReason.REFUSED: Outcome.HTTP_ERROR,
    EndReason.IDLE: Outcome.UNKNOWN,
    EndReason.UNREADABLE: Outcome.UNKNOWN,
    EndReason.SHUTDOWN: Outcome.UNKNOWN,
}
SHUTDOWN_ERROR = "proxy_shutdown"
_RESPONSE: Final = tuple(field.name for field in fields(ResponseFacts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestIdentity:
    """Identity of a request: its ids and where they came from.

    It also holds the head that carries the ids upstream.
    """

    ids: SpanIds
    origin: trace_context.Origin
    inbound: trace_context.Inbound
    raw_request_id: bytes | None
    request_id_added: bool
    head_out: bytes


def observed_operation(head: RequestHead) -> str | None:
    """The API of a request that gets a record; None for any other request.

    Such a request is a POST to a generation path.
    """
    return operation_of(head.path) if head.method == b"POST" else None


def identify(
    head: RequestHead, *, add_request_id: bool = False, set_trace_context: bool = False, exported: bool = False
) -> RequestIdentity:
    """Choose a request's ids and the head that goes upstream (DESIGN section 4).

    ``add_request_id``: where it has none. ``set_trace_context``: its ``traceparent`` becomes ours. ``exported``: a trace that
    starts here may be sampled.
    """
    inbound = trace_context.extract(head.headers)
    raw_id = head.first(b"x-request-id")
    added = add_request_id and raw_id is None
    if added:
        raw_id = identity.new_request_id().encode()
    key = None
    if raw_id is not None:
        key = identity.request_key(raw_id.decode("utf-8", "surrogateescape"), identity.IdOrigin.CLIENT).key
        if not identity.joinable(key):  # the value of a counter would put unrelated requests into one trace
            key = None
    ids, origin = trace_context.continue_from(inbound, key, exported=exported)
    return RequestIdentity(
        ids=ids,
        origin=origin,
        inbound=inbound,
        raw_request_id=raw_id,
        request_id_added=added,
        head_out=rewrite(
            head,
            traceparent=trace_context.format_traceparent(ids) if set_trace_context else None,
            request_id=raw_id if added else None,
        ),
    )


class ExchangeObserver:
    """Observer of one running request.

    The relay writes the stamps that are attributes here; ``record`` reads all of them.
    """

    def __init__(
        self,
        *,
        process: Process,
        head: RequestHead,
        identity: RequestIdentity,
        operation: str | None,
        arrival_ns: int,
        arrival_unix_ns: int,
        stats: ProxyStats,
        live: LiveRequest | None = None,
    ) -> None:
        self.arrival_ns = arrival_ns
        self.operation = operation
        self.head_out = identity.head_out
        self.raw_request_id = identity.raw_request_id
        self.recorded = False
        self.forwarded_ns: int | None = None
        self.request_done_ns: int | None = None
        self.last_read_ns: int | None = None
        self.first_delivered_ns: int | None = None
        self.write_blocked_ns = 0
        self._held: list[tuple[int, int]] = []
        self.status: int | None = None
        self.error_type: str | None = None
        self._process = process
        self._method = head.method.decode("latin-1")
        self._path = head.path
        self._identity = identity
        self._arrival_unix_ns = arrival_unix_ns
        self._stats = stats
        self._hints = list(identity.inbound.hints)
        self._inspector = (
            RequestInspector(
                head.path, _text(head.first(b"content-type")), head.content_length, _text(head.first(b"content-encoding"))
            )
            if operation is not None
            else None
        )
        self._request: RequestFacts | None = None
        self._reader: ResponseReader | None = None
        self._content_encoding: str | None = None
        self._streams = False
        self._body_seen = False
        self._late: list[tuple[bytes, int]] = []
        self._live = live

    @property
    def content_seen(self) -> bool:
        """Note that content has been read.

        It is the first chunk of a stream that holds content, or the first byte of any other body.
        """
        reader = self._reader
        return reader is not None and (reader.events > 0 if self._streams else self._body_seen)

    @property
    def finish_seen(self) -> bool:
        """Note that the response marked the end of generation."""
        self._catch_up()
        return self._reader is not None and self._reader.finished

    def held(self, begin_ns: int, end_ns: int) -> None:
        """Note an interval in which the response was not read.

        The client took nothing between these two stamps.
        """
        if len(self._held) < HELD_LIMIT:
            self._held.append((begin_ns, end_ns))

    def hint(self, hint: Hint) -> None:
        """Note an oddity once."""
        if hint not in self._hints:
            self._hints.append(hint)

    def request_body(self, data: bytes) -> None:
        """Note a piece of the request's body."""
        if self._inspector is not None:
            try:
                self._inspector.feed(data)
            except Exception:  # an observer's bug must not cost the request
                self._stats.observer_errors += 1
                self._inspector = None

    def request_body_missing(self, size: int) -> None:
        """Note that the next ``size`` bytes of the request's body passed unseen."""
        if self._inspector is not None:
            self._inspector.skip(size)

    def response_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> Body | None:
        """Read the final head of the response; return what takes its body.

        Header names are in lower case.
        """
        self.status = status
        if self.operation is None:
            return None
        found = dict(reversed(headers))  # the first header of a name counts
        self._content_encoding = _text(found.get(b"content-encoding"))
        content_type = _text(found.get(b"content-type"))
        self._streams = content_type is not None and content_type.lower().startswith("text/event-stream")
        request_facts = self._facts()
        self._reader = ResponseReader(
            self.operation,
            choices=request_facts.choices,
            status=status,
            content_type=content_type,
            content_encoding=self._content_encoding,
            continuous_usage=request_facts.continuous_usage,
        )
        if self._live is not None:
            self._live.answered(self._reader, status, request_facts.model)
        return self._response_body

    def record(self, ending: EndReason, at_ns: int) -> Exchange:
        """Make the record of the exchange, ended at ``at_ns``.

        Call it once: it also counts the exchange.
        """
        record = self._record(ending, at_ns)
        if self._live is not None:
            try:
                self._live.ended(record)
            except Exception:  # an error in counting must not cost the record
                self._stats.observer_errors += 1
        return record

    def _record(self, ending: EndReason, at_ns: int) -> Exchange:
        request, seen = self._facts(), self._stream_facts(ending, at_ns)
        if self.write_blocked_ns >= CLIENT_SLOW_NS:
            self.hint(Hint.CLIENT_SLOW)
        who = self._identity
        clipped = identity.clip_request_id(who.raw_request_id) if who.raw_request_id is not None else None
        if clipped is not None and clipped.hash is not None:
            self.hint(Hint.LONG_REQUEST_ID)
        facts = seen if seen is not None else ResponseFacts()
        response: dict[str, Any] = {name: getattr(facts, name) for name in _RESPONSE}
        response["model"] = facts.model or request.model
        response["hints"] = tuple(dict.fromkeys((*self._hints, *facts.hints)))
        if (error_type := SHUTDOWN_ERROR if ending is EndReason.SHUTDOWN else self.error_type) is not None:
            response["error_type"], response["error_code"] = error_type, None
        return Exchange(
            process=self._process,
            source=Source.PROXY,
            ids=who.ids,
            arrival_unix_ns=self._arrival_unix_ns,
            duration_ns=at_ns - self.arrival_ns,
            outcome=self._outcome(ending, seen),
            method=self._method,
            path=self._path,
            operation=self.operation,
            trace_origin=who.origin.value,
            client_parent=who.inbound.client_parent,
            request_id=clipped.text if clipped is not None else None,
            request_id_hash=clipped.hash if clipped is not None else None,
            request_id_added=who.request_id_added,
            choices=request.choices,
            stream_requested=request.stream_requested,
            inspected=request.inspected,
            status=self.status,
            forwarded_ns=self._offset(self.forwarded_ns),
            request_done_ns=self._offset(self.request_done_ns),
            first_delivered_ns=self._offset(self.first_delivered_ns),
            write_blocked_ns=self.write_blocked_ns,
            content_encoding=self._content_encoding,
            kv_in=request.kv,
            exemplar=self._live is not None and self._live.exemplar,
            **response,
        )

    def _response_body(self, data: bytes, stamp_ns: int) -> None:
        late = self._late
        late.append((data, stamp_ns))
        if self.first_delivered_ns is None or len(late) >= LATE_READS or len(data) > LATE_BYTES:
            self._catch_up()

    def overdue(self, before_ns: int) -> None:
        """Process the reads that came before ``before_ns`` now.

        Otherwise a stream that has become slow would be processed late.
        """
        if self._late and self._late[0][1] < before_ns:
            self._catch_up()

    def _catch_up(self) -> None:
        """Process the postponed reads."""
        late, self._late = self._late, []
        reader = self._reader
        if reader is None:
            return
        self._body_seen = self._body_seen or bool(late)
        try:
            for data, stamp_ns in late:
                reader.feed(data, stamp_ns - self.arrival_ns)
        except Exception:  # an observer's bug must not cost the response
            self._stats.observer_errors += 1
            self._reader = None
            return
        if late and self._live is not None:
            try:
                self._live.look(reader)
            except Exception:  # nor may an error in counting cost what was read
                self._stats.observer_errors += 1
                self._live = None

    def _facts(self) -> RequestFacts:
        if self._request is None:
            self._request = RequestFacts(operation=self.operation)
            if self._inspector is not None:
                try:
                    self._request = self._inspector.facts(ended=self.request_done_ns is not None)
                except Exception:
                    self._stats.observer_errors += 1
                self._inspector = None  # this frees up to 1.5 MiB of body too
        return self._request

    def _stream_facts(self, ending: EndReason, at_ns: int) -> StreamFacts | None:
        self._catch_up()
        if self._reader is None:
            return None
        try:
            self._reader.finish(at_ns - self.arrival_ns, _READER_ENDS.get(ending, End.CLIENT_GONE))
            arrival = self.arrival_ns
            return self._reader.facts([(begin - arrival, end - arrival) for begin, end in self._held])
        except Exception:
            self._stats.observer_errors += 1
            return None

    def _outcome(self, ending: EndReason, seen: StreamFacts | None) -> Outcome:
        if seen is not None and ending in _READER_ENDS:
            return seen.outcome
        if ending is EndReason.CLEAN:
            return Outcome.HTTP_ERROR if self.status is not None and self.status >= 400 else Outcome.OK
        return _PLAIN_OUTCOMES[ending]

    def _offset(self, stamp_ns: int | None) -> int | None:
        return None if stamp_ns is None else stamp_ns - self.arrival_ns


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
