"""Read when a response's tokens came and how the response ended.

It reads the body of one HTTP response as it streams through. DESIGN section 5 ("Tokens") is the definition: ``ttft_token`` is
the first generated token, its text may be empty; ``ttft_text`` the first visible text, reasoning, tool call or refusal; a
role-only chunk and a usage-only chunk are neither. An event has the time of the read that completes it. Nothing here keeps
text, and nothing raises on what a server sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.records import Hint, Outcome, ResponseFacts
from handrail.stalls import marked
from handrail_sidecar.proxy.completions import Completions
from handrail_sidecar.proxy.dialects import dialect, read_body
from handrail_sidecar.proxy.inflate import UndecodableError, decoder
from handrail_sidecar.proxy.response_state import Tally
from handrail_sidecar.proxy.sse import SseParser
from handrail_sidecar.proxy.token_timing import TakeGaps, TakeShares

BODY_LIMIT_BYTES: Final = 4 << 20  # longest JSON body that is read; the facts of a longer one stay unknown
_BURST_EVENTS: Final = 8
_BURST_GAP_NS: Final = 200_000  # time per chunk below what any model needs
_BURST_SHARE: Final = 20  # the burst is at most a twentieth of the wait before it
_BUFFERED_TOKENS: Final = 4  # tokens a tool-call chunk, above which a parser holds text back
_HELD_NS: Final = 50_000_000  # from the first compressed byte to the first text, above which a compressor holds text back


class End(str, Enum):
    """How the transfer of the response ended."""

    CLEAN = "clean"
    UPSTREAM_CUT = "upstream_cut"  # closed or reset inside the body
    CLIENT_GONE = "client_gone"
    IDLE_AFTER_FINISH = "idle_after_finish"  # every choice finished, then neither [DONE] nor a close within the limit
    TIMED_OUT = "timed_out"  # the proxy's own limit on a response that had not finished


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts(ResponseFacts):
    """What one response showed, and what of that only its reader needs."""

    outcome: Outcome
    end_ns: int | None = None
    lost_events: int = 0  # malformed or above the limit


class ResponseReader:
    """Read every read of one response's body, transfer coding removed.

    It takes a few microseconds a chunk (tests/bench/bench_stream.py).
    ``choices``: as in the request, None when that was not read. ``continuous_usage``: as in the request; without it, running
    totals make a per-token ITL only if the sum at the end confirms them.
    """

    def __init__(
        self,
        operation: str | None,
        *,
        choices: int | None,
        status: int,
        content_type: str | None,
        content_encoding: str | None,
        continuous_usage: bool | None,
    ) -> None:
        self._tally = Tally(1 if operation in ("responses", "messages") else choices)
        self._dialect = dialect(operation, self._tally)
        self._totals_requested = continuous_usage is True
        self._status = status
        media = content_type.partition(";")[0].strip().lower() if content_type else ""
        self._stream = media == "text/event-stream" if media else None
        self._json = media.endswith("json")
        self._decoder = decoder(content_encoding)
        self._compressed = content_encoding is not None and content_encoding.strip().lower() not in ("", "identity")
        wanted = self._dialect is not None or status >= 400
        self._undecodable = wanted and self._decoder is None
        self._reads = wanted and self._decoder is not None
        self._sse = SseParser() if self._stream and self._dialect is not None else None
        # The quick way is for chunks without event names, the bulk of all traffic.
        self._plain = isinstance(self._dialect, Completions) and self._sse is not None and self._reads and not self._compressed
        self._event = self._dialect.event if self._dialect is not None else None
        self._ready = False  # the parser is between events: the quick way may be taken
        self._body: bytearray | None = bytearray()
        self._ttfb_ns: int | None = None
        self._content_times = 0  # how often content came, however many chunks at a time; the quick way does not count it
        self._end: End | None = None
        self._end_ns: int | None = None

    @property
    def events(self) -> int:
        """Chunks with content so far."""
        return self._tally.events

    @property
    def finished(self) -> bool:
        """Whether generation has ended, so that a close may follow any time.

        True when every choice has a finish reason, or the API's end marker came.
        """
        return self._tally.done or self._tally.all_finished

    @property
    def model(self) -> str | None:
        """The model's name in the response, so far."""
        return self._tally.model

    @property
    def first_token_ns(self) -> int | None:
        """When the first token came.

        None before that, and when an event before it could not be read.
        """
        return None if self._tally.lost_first else self._tally.first_token_ns

    def follow(self, gaps: TakeGaps, shares: TakeShares) -> None:
        """Make ``tell`` pass on new gaps from now on.

        Gaps per token are passed on only when the request asked for running totals.
        Nothing is passed on when the number of choices in the request is unknown: only the end shows which chunks belong to one.
        """
        if self._tally.choices_known:
            self._tally.cadence.follow(gaps, shares if self._totals_requested else None)

    def tell(self) -> None:
        """Pass on the gaps since the last call."""
        self._tally.cadence.tell()

    def feed(self, data: bytes, at_ns: int) -> None:
        """Process one socket read that came ``at_ns`` after the request's arrival.

        The read is stamped before it is passed on.
        """
        # One read is one whole event, as vLLM and the routers send them: no need for the line parser.
        if (
            self._ready
            and data.startswith(b'data: {"')
            and data.endswith(b"}\n\n")
            and data.find(b"\n", 8, -2) < 0
            and b"\r" not in data
            and self._event is not None
        ):
            self._event(b"", data[6:-2], at_ns)
        else:
            self._slow(data, at_ns)

    def _slow(self, data: bytes, at_ns: int) -> None:
        if not data:
            return
        if self._ttfb_ns is None:
            self._ttfb_ns = at_ns
        if not self._reads or self._decoder is None:
            return
        try:
            data = self._decoder.push(data)
        except UndecodableError:
            self._reads = self._plain = self._ready = False
            self._undecodable = True
            return
        if self._sse is None:
            self._keep(data)
        else:
            before = self._tally.last_content_ns
            self._events(self._sse, data, at_ns)
            self._content_times += self._tally.last_content_ns != before
            self._ready = self._plain and self._sse.between_events and not self._tally.done

    def _events(self, sse: SseParser, data: bytes, at_ns: int) -> None:
        for event_name, event in sse.push(data):
            if self._tally.done or self._event is None:
                return  # nothing after the end marker belongs to the response
            if event is None:
                self._tally.lost()
            elif event:
                self._event(event_name, event, at_ns)

    def _keep(self, data: bytes) -> None:
        if self._body is not None:
            self._body += data
            if len(self._body) > BODY_LIMIT_BYTES:
                self._body = None

    def finish(self, at_ns: int, end: End) -> None:
        """Note that the transfer ended; only the first call counts."""
        if self._end is not None:
            return
        self._end, self._end_ns = end, at_ns
        if self._sse is None and self._body and self._reads:
            try:
                read_body(self._body, self._dialect, self._tally, self._status >= 400)
            except ValueError:
                # A body that was cut may be unreadable; a whole one should be what its type says.
                self._undecodable = self._json and end is End.CLEAN
        self._body = None

    def facts(self, held: Sequence[tuple[int, int]] = ()) -> StreamFacts:
        """Return what is known so far; the outcome is ``unknown`` until ``finish``.

        ``held``: the intervals in which nothing was read since the client took nothing, on the clock of ``feed``.
        """
        tally = self._tally
        cadence = tally.measured
        output = tally.output_tokens if tally.output_tokens is not None else cadence.output_tokens
        burst = self._burst()
        held_back = self._held_back(burst, output)
        stalls = cadence.stalls()
        steady = not (burst or held_back or tally.lost_events)  # times of chunks show something of the times of tokens
        return StreamFacts(
            outcome=self._outcome(),
            stream=self._stream,
            ttfb_ns=self._ttfb_ns,
            ttft_token_ns=self._first_token_ns(output),
            ttft_text_ns=None if tally.lost_first else tally.first_text_ns,
            ttft_text_kind=None if tally.lost_first else tally.text_kind,
            last_content_ns=tally.last_content_ns,
            finish_ns=tally.finish_ns,
            end_ns=self._end_ns,
            events=tally.events,
            lost_events=tally.lost_events,
            gaps=cadence.gaps(),
            itl=cadence.itl(tally.output_tokens, trusted=self._totals_requested),
            stalls=marked(stalls, held, tally.turns) if stalls is not None and not burst else None,
            tpot_mean_ns=cadence.tpot_mean_ns(output) if steady else None,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=output,
            cached_tokens=tally.cached_tokens,
            finish_reasons=tally.finish_reasons,
            response_id=tally.response_id,
            model=tally.model,
            kv_out=tally.kv,
            error_type=tally.error_type,
            error_code=tally.error_code,
            hints=self._hints(burst, held_back),
        )

    def _first_token_ns(self, output_tokens: int | None) -> int | None:
        tally = self._tally
        if tally.lost_first:
            return None
        if tally.first_token_ns is None and output_tokens:
            return tally.finish_ns  # tokens came, none with text: they show at the chunk that finished
        return tally.first_token_ns

    def _outcome(self) -> Outcome:
        tally = self._tally
        if self._end is None:
            return Outcome.UNKNOWN
        if self._status >= 400:
            return Outcome.HTTP_ERROR
        if tally.error:
            return Outcome.STREAM_ERROR
        if tally.incomplete:
            return Outcome.INCOMPLETE
        if tally.aborted:
            return Outcome.ABORTED
        if self._sse is None:
            return _CUT.get(self._end) or (Outcome.UNKNOWN if self._undecodable else Outcome.OK)
        if tally.done and tally.all_finished:
            return Outcome.OK
        if tally.all_finished and self._end in (End.CLEAN, End.CLIENT_GONE, End.IDLE_AFTER_FINISH):
            return Outcome.OK
        if tally.done:
            return Outcome.UNKNOWN_FINISH
        return _CUT.get(self._end) or (Outcome.UNKNOWN if self._undecodable else Outcome.TRUNCATED)

    def _burst(self) -> bool:
        """Whether everything came at once at the end.

        The times between chunks then show nothing of the model.
        """
        tally = self._tally
        if tally.events < _BURST_EVENTS or tally.first_text_ns is None or tally.last_content_ns is None:
            return False
        spread = tally.last_content_ns - tally.first_text_ns
        return spread <= (tally.events - 1) * _BURST_GAP_NS and spread * _BURST_SHARE <= tally.first_text_ns

    def _hints(self, burst: bool, held_back: bool) -> tuple[Hint, ...]:
        tally = self._tally
        hints = []
        if burst and not self._compressed:
            hints.append(Hint.FAKE_STREAM)
        if held_back:
            hints.append(Hint.BUFFERED)
        if self._end is End.IDLE_AFTER_FINISH and not tally.done:
            hints.append(Hint.CLOSE_MISSING)
        if self._undecodable or tally.lost_events:
            hints.append(Hint.UNDECODABLE)
        if tally.events and tally.reasoning == tally.events and "stop" in tally.finish_reasons:
            hints.append(Hint.REASONING_ONLY)
        return tuple(hints)

    def _held_back(self, burst: bool, output: int | None) -> bool:
        """Whether something between the model and the proxy held text back.

        It is a compressor whose header came long before any text, with chunks in bundles, or a parser that releases calls whole.
        """
        tally = self._tally
        if self._compressed and tally.first_text_ns is not None and self._ttfb_ns is not None:
            waited = tally.first_text_ns - self._ttfb_ns >= _HELD_NS
            return burst or (waited and tally.events > self._content_times)
        return tally.tool_calls > 0 and output is not None and output > _BUFFERED_TOKENS * tally.events


_CUT: Final = {
    End.UPSTREAM_CUT: Outcome.UPSTREAM_DISCONNECT,
    End.CLIENT_GONE: Outcome.CLIENT_DISCONNECT,
    End.TIMED_OUT: Outcome.TIMED_OUT,
    End.IDLE_AFTER_FINISH: Outcome.TIMED_OUT,  # when not every choice had finished
}
