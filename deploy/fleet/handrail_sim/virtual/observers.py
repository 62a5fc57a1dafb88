"""The records that real sidecars would make of a virtual fleet's requests.

Ids, parents and connector keys are those of a real fleet, so that the real rules make the joins. The client sends an
``X-Request-Id`` and no ``traceparent``, every proxy continues the trace, vLLM's span is below the proxy in front of it, and D
reads the KV that P published.
Exporters send as the real ones do: a sidecar twice a second, vLLM's batch processor every five seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Final, Generic, TypeVar

from handrail.identity import derive_trace_id
from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import EngineRequest, Exchange, Gaps, KvParams, Outcome, Role, RouterCall, Source, SpanIds
from handrail.stalls import Stalls, StallWatch, marked
from handrail.wire.engines.vllm import NEVER_SCHEDULED
from handrail_collector.stitch.evidence import Item
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import EngineObservation, ProxyObservation, RouterObservation, clocks, observe
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Ran, over_ns
from handrail_sim.virtual.engines import EngineRecord, engine_records, processes
from handrail_sim.virtual.plugin import PluginRecords

_SIDECAR_EVERY_NS: Final = 500_000_000
_ENGINE_EVERY_NS: Final = 5_000_000_000
_PATH: Final = "/v1/completions"

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class TimedRecord(Generic[_Record]):
    """A record and when the collector receives it.

    ``received_unix_ns``: by the collector's own right clock.
    """

    received_unix_ns: int
    record: _Record


def arrivals(
    scenario: Scenario,
    flights: Sequence[Flight],
    faults: Sequence[Fault],
    *,
    seed: int,
    started_unix_ns: int,
    plugin: bool = False,
) -> list[TimedRecord[Item]]:
    """Build all request records that a collector receives of a run, in that order.

    ``plugin``: the engines have one. A client that still waits when the run is over gives up then: its proxies see a disconnect.
    """
    fleet = _Fleet(scenario, faults, seed, started_unix_ns, over_ns(flights))
    made = [one for flight in flights for one in fleet.records(flight)]
    if plugin:
        made += [one for flight in flights for one in fleet.plugin_records(flight)]
    made.sort(key=lambda one: one.received_unix_ns)
    return made


def engine_arrivals(
    scenario: Scenario, ran: Ran, faults: Sequence[Fault], *, seed: int, started_unix_ns: int
) -> list[TimedRecord[EngineRecord]]:
    """Build the records of plugins and samplers that belong to no single request.

    They are in the order in which the collector receives them.
    """
    fleet = _Fleet(scenario, faults, seed, started_unix_ns, over_ns(ran.flights))
    made = list(fleet.engine_records(ran))
    made.sort(key=lambda one: one.received_unix_ns)
    return made


@dataclass(slots=True)
class _Request:
    """The ids of one request, which all of its records share."""

    trace_id: str
    edge: str
    prefill_parent: str
    decode_parent: str
    kv: KvParams | None
    at: dict[str, str] = field(default_factory=dict)  # host: span id of the proxy in front of it


class _Fleet:
    """The processes that report, and their ids."""

    def __init__(self, scenario: Scenario, faults: Sequence[Fault], seed: int, started_unix_ns: int, over_ns: int) -> None:
        self._scenario = scenario
        self._faults = faults
        self._random = Random(f"ids-{seed}")
        self._started_unix_ns = started_unix_ns
        self._over_ns = over_ns
        self._clocks = clocks(scenario, faults, started_unix_ns)
        self._processes = {
            host: replace(process, service=f"handrail-{process.role.value}") for host, process in processes(scenario).items()
        }
        self._engine_ids = {host: f"{self._random.getrandbits(128):032x}" for host in scenario.hosts().prefill}
        self._published: dict[str, KvParams | None] = {}
        self._last_gaps: tuple[tuple[int, ...], Gaps | None] = ((), None)
        self._plugins = PluginRecords(scenario, self._processes, self._engine_ids, self._clocks, over_ns, self._span_id)

    def records(self, flight: Flight) -> Iterator[TimedRecord[Item]]:
        """Build the records of a flight's proxies, engines and router."""
        request = self._request(flight)
        for seen in observe(self._scenario, flight, self._faults, self._clocks):
            if isinstance(seen, ProxyObservation):
                yield self._arrives(seen.reported_ns, _SIDECAR_EVERY_NS, self._exchange(seen, request))
            elif isinstance(seen, EngineObservation):
                yield self._arrives(seen.reported_ns, _ENGINE_EVERY_NS, self._engine(seen, request))
            else:
                yield self._arrives(seen.reported_ns, _ENGINE_EVERY_NS, self._call(seen, request))

    def plugin_records(self, flight: Flight) -> Iterator[TimedRecord[Item]]:
        """Build the plugin's records of a flight.

        Call it after ``records`` of all flights, so that their ids are the same with and without a plugin.
        """
        for reported_ns, record in self._plugins.of(flight, self._published[flight.id]):
            yield self._arrives(reported_ns, _SIDECAR_EVERY_NS, record)

    def engine_records(self, ran: Ran) -> Iterator[TimedRecord[EngineRecord]]:
        """Build the engine records that belong to no single request."""
        for reported_ns, record in engine_records(ran, self._processes, self._clocks, self._over_ns):
            yield self._arrives(reported_ns, _SIDECAR_EVERY_NS, record)

    def _arrives(self, reported_ns: int | None, every_ns: int, record: _Record) -> TimedRecord[_Record]:
        """Send a record with the next batch of its exporter.

        ``reported_ns``: true time; None: when the run is over.
        """
        at_ns = self._over_ns if reported_ns is None else reported_ns
        return TimedRecord(self._started_unix_ns + (at_ns // every_ns + 1) * every_ns, record)

    def _span_id(self) -> str:
        return f"{self._random.getrandbits(64) or 1:016x}"

    def _request(self, flight: Flight) -> _Request:
        edge, split = self._span_id(), flight.plan.prefill_host != flight.plan.decode_host
        calls = [self._span_id() for _ in range(3)] if self._scenario.router_traces else []
        published = None
        if split:
            published = KvParams(
                do_remote_prefill=True,
                do_remote_decode=False,
                remote_engine_id=self._engine_ids[flight.plan.prefill_host],
                remote_request_id=f"cmpl-{flight.id}-0-{self._random.getrandbits(32):08x}",
                remote_num_tokens=flight.plan.arrival.prompt_tokens,
                transfer_mode="pull",
            )
        prefill, decode = calls[1:] or (edge, edge)
        self._published[flight.id] = published
        request = _Request(derive_trace_id(flight.id), edge, prefill, decode, published)
        if calls:
            request.at |= {"server": calls[0], "prefill": calls[1], "decode": calls[2]}
        return request

    def _exchange(self, seen: ProxyObservation, request: _Request) -> Exchange:
        process = self._processes[seen.host]
        prefills, decodes = process.role is Role.PREFILL, process.role is Role.DECODE
        failed = seen.error or seen.status >= 400
        answered = seen.end_ns is not None and not failed
        if process.role is Role.EDGE:
            span, parent = request.edge, ""
        else:
            span, parent = self._span_id(), request.prefill_parent if prefills else request.decode_parent
            request.at[seen.host] = span
        duration_ns = seen.end_ns
        if duration_ns is None:
            duration_ns = max(seen.first_token_ns or 0, self._over_ns + self._started_unix_ns - seen.arrival_unix_ns, 0)
        gaps, stalls = (None, None) if prefills else self._gaps(seen, duration_ns)
        return Exchange(
            process=process,
            source=Source.PROXY,
            ids=SpanIds(trace_id=request.trace_id, span_id=span, parent_span_id=parent, flags=1),
            arrival_unix_ns=seen.arrival_unix_ns,
            duration_ns=duration_ns,
            outcome=_outcome(seen),
            error_type="InternalServerError" if failed else None,
            path=_PATH,
            operation="text_completion",
            trace_origin="derived" if process.role is Role.EDGE else "inbound",
            request_id=seen.request_id,
            response_id=f"cmpl-{seen.request_id}" if answered else None,
            model=self._scenario.model,
            choices=1,
            stream=not prefills,
            stream_requested=not prefills,
            status=seen.status,
            ttfb_ns=seen.end_ns if prefills else seen.first_token_ns,
            ttft_token_ns=seen.first_token_ns if not seen.error else None,
            ttft_text_ns=seen.first_token_ns if not seen.error else None,
            gaps=gaps,
            stalls=stalls,
            prompt_tokens=seen.prompt_tokens,
            output_tokens=seen.completion_tokens,
            cached_tokens=seen.cached_tokens,
            finish_reasons=("length",) if answered else (),
            kv_in=request.kv if decodes else None,
            kv_out=request.kv if prefills and answered else None,
        )

    def _gaps(self, seen: ProxyObservation, duration_ns: int) -> tuple[Gaps | None, Stalls | None]:
        """Sketch the gaps of a stream.

        The edge and D see the same gaps unless their clocks drift, so they share one sketch.
        """
        gaps = seen.gaps_ns
        if not gaps:
            return None, None
        known, made = self._last_gaps
        if known != gaps or made is None:
            sketch = GapSketch()
            sketch.extend(list(gaps))
            made = Gaps(
                unit="chunk",
                count=len(gaps),
                sum_ns=sketch.sum_ns,
                max_ns=max(gaps),
                max_at_ns=0,
                sketch=sketch.encode(),
            )
            self._last_gaps = gaps, made
        ends = list(accumulate(gaps, initial=seen.first_token_ns or 0))[1:]
        watch = StallWatch()
        watch.extend(gaps, ends)
        stalls = watch.stalls()
        largest_at_ns = min(ends[gaps.index(made.max_ns)], duration_ns)
        return replace(made, max_at_ns=largest_at_ns), marked(stalls, seen.held_ns, ()) if stalls is not None else None

    def _engine(self, seen: EngineObservation, request: _Request) -> EngineRequest:
        """Build the record that the reader of vLLM's spans would make.

        The figures of a request without a token are left out, since they mean nothing.
        """
        scheduled = seen.queue_ns >= 0
        made = scheduled and seen.completion_tokens > 0
        return EngineRequest(
            process=self._processes[seen.host],
            source=Source.OTLP,
            ids=SpanIds(trace_id=request.trace_id, span_id=self._span_id(), parent_span_id=request.at[seen.host], flags=1),
            engine="vllm",
            request_id=f"cmpl-{seen.request_id}-0",
            start_unix_ns=seen.arrival_unix_ns,
            end_unix_ns=seen.end_unix_ns,
            ttft_ns=seen.ttft_ns if made else None,
            e2e_ns=seen.end_unix_ns - seen.arrival_unix_ns,
            queue_ns=seen.queue_ns if made else None,
            prefill_ns=seen.prefill_ns if made else None,
            decode_ns=seen.decode_ns if made else None,
            prompt_tokens=seen.prompt_tokens,
            output_tokens=seen.completion_tokens,
            outcome=(Outcome.OK if seen.completion_tokens else Outcome.UNKNOWN) if scheduled else Outcome.ABORTED,
            dropped_attributes=() if scheduled else NEVER_SCHEDULED,
        )

    def _call(self, seen: RouterObservation, request: _Request) -> RouterCall:
        server = seen.leg == "server"
        parent = request.edge if server else request.at["server"]
        return RouterCall(
            process=self._processes[seen.host],
            source=Source.OTLP,
            ids=SpanIds(trace_id=request.trace_id, span_id=request.at[seen.leg], parent_span_id=parent, flags=1),
            router="vllm-router",
            kind="server" if server else "client",
            start_unix_ns=seen.start_unix_ns,
            end_unix_ns=seen.end_unix_ns if server else None,  # the ends of its calls are wrong
            phase=None if server else Role(seen.leg),
            request_id=seen.request_id,
            peer=self._processes[seen.peer].instance if seen.peer else None,
            path=_PATH,
            status=200,
        )


def _outcome(seen: ProxyObservation) -> Outcome:
    if seen.status >= 400:
        return Outcome.HTTP_ERROR
    if seen.error:
        return Outcome.STREAM_ERROR
    return Outcome.OK if seen.end_ns is not None else Outcome.CLIENT_DISCONNECT
